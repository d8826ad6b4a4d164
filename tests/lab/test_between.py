"""What pooling keeps of distances between graphs, on clouds whose distances are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist, squareform

from flowpool.lab.between import EXACT, METHODS, between_plot, between_table, compare, kernel_accuracy
from flowpool.lab.datasets import GraphDataset

RANDOM = np.random.default_rng(0)


def shifted_clouds(num_graphs: int, num_nodes: int, dim: int) -> GraphDataset:
    """One cloud in many places, so that W_2 is the distance of the means; the class is the side on which it lies."""
    cloud = RANDOM.normal(size=(num_nodes, dim))
    places = 3 * RANDOM.normal(size=(num_graphs, dim))
    nodes = np.concatenate([cloud + place for place in places])
    counts = torch.full((num_graphs,), num_nodes)
    return GraphDataset(
        name="shifted",
        features=torch.from_numpy(nodes).float(),
        node_ptr=torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]),
        edge_index=torch.empty(2, 0, dtype=torch.long),
        edge_ptr=torch.zeros(num_graphs + 1, dtype=torch.long),
        labels=torch.from_numpy((places[:, 0] > np.median(places[:, 0])).astype(np.int64)),
        class_names=("left", "right"),
    )


def test_every_method_keeps_distances_of_shifted_clouds_and_whole_ones_keep_all() -> None:
    graphs = shifted_clouds(40, 6, 2)
    rows = between_table(graphs, (6,))
    assert [row.method for row in rows] == [EXACT, *METHODS]
    for row in rows:
        # Features are standardised, so that distances are known up to a scale of each axis alone.
        assert row.correlation > 0.99, row
        assert row.accuracy > 0.7, row
    exact = {row.method: row for row in rows}
    for method in (EXACT, "k-means per graph", "random nodes"):  # with as many points as nodes
        assert exact[method].error < 1e-6 and exact[method].neighbours > 0.99
    assert len(between_plot(rows).axes) == 4


def test_fewer_random_nodes_keep_less() -> None:
    graphs = shifted_clouds(40, 12, 2)
    rows = {row.method: row for row in between_table(graphs, (1,))}
    assert rows["random nodes"].correlation < 0.95 < rows["flow-step"].correlation
    assert rows["random nodes"].neighbours < rows["flow-step"].neighbours


def test_compare_by_hand() -> None:
    places = np.array([0.0, 1, 3, 7, 15, 31, 63])[:, None]
    exact = squareform(pdist(places))
    assert compare(exact, exact) == pytest.approx((1, 0, 1))
    assert compare(exact, 1.1 * exact) == pytest.approx((1, 0.1, 1))
    far = exact.copy()
    far[0, 1:6] = far[1:6, 0] = 1000  # of the five nearest of the first graph four are left
    assert compare(exact, far)[2] < 1
    assert compare(exact, far)[0] < 0


def test_the_kernel_learns_what_distances_tell_and_nothing_from_noise() -> None:
    labels = np.arange(60) % 2
    told = np.abs(np.subtract.outer(labels, labels)) + 0.1 * (1 - np.eye(60))
    assert kernel_accuracy(told, labels, 0) == 1
    noise = squareform(RANDOM.uniform(1, 2, 60 * 59 // 2))
    assert kernel_accuracy(noise, labels, 0) < 0.75
