"""Shapes: two moments that say nothing, a shape that says a lot."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

from flowpool.lab.datasets.record import GraphDataset
from flowpool.lab.datasets.shapes import NUM_NEIGHBOURS, make_shapes, nearest_neighbours, standardise


@pytest.fixture(scope="module")
def shapes() -> GraphDataset:
    return make_shapes(40, seed=1)


def test_ten_classes_of_equal_number_and_equal_sizes(shapes: GraphDataset) -> None:
    assert shapes.num_classes == 10
    assert torch.bincount(shapes.labels).tolist() == [40] * 10
    sizes = shapes.node_ptr.diff()
    assert 30 <= int(sizes.min()) < int(sizes.max()) <= 120
    for number in range(1, 10):
        assert torch.equal(sizes[shapes.labels == number], sizes[shapes.labels == 0])


def test_mean_and_covariance_are_equal_for_all(shapes: GraphDataset) -> None:
    for x, *_ in shapes:
        points = x.double().numpy()
        assert np.abs(points.mean(axis=0)).max() < 1e-6
        assert np.abs(np.cov(points.T, bias=True) - np.eye(3)).max() < 1e-6


def accuracy(table: np.ndarray, labels: np.ndarray) -> float:
    return float(cross_val_score(LogisticRegression(max_iter=1000), table, labels, cv=5).mean())


def test_two_moments_are_at_chance_and_distances_are_not(shapes: GraphDataset) -> None:
    labels = shapes.labels.numpy()
    moments, distances = [], []
    for x, *_ in shapes:
        points = x.double().numpy()
        covariance = np.cov(points.T, bias=True).ravel()
        moments.append(np.concatenate([points.mean(axis=0), points.sum(axis=0), covariance, [len(points)]]))
        distances.append(np.quantile(np.linalg.norm(points, axis=1), np.linspace(0, 1, 11)))
    table = np.stack(moments)
    # Even if the last bits of rounding are blown up to full size.
    scaled = (table - table.mean(axis=0)) / table.std(axis=0)
    # Chance is 0.1; its standard deviation over 400 clouds is 0.015.
    assert accuracy(table, labels) < 0.1 + 5 * 0.015
    assert accuracy(scaled, labels) < 0.1 + 5 * 0.015
    assert accuracy(np.stack(distances), labels) > 0.5


def test_neighbours_are_the_nearest(shapes: GraphDataset) -> None:
    x, edge_index, *_ = shapes[7]
    distance = torch.cdist(x.double(), x.double()).fill_diagonal_(torch.inf)
    linked = torch.zeros_like(distance, dtype=torch.bool)
    linked[edge_index[0], edge_index[1]] = True
    assert torch.equal(linked, linked.T)
    nearest = distance <= distance.kthvalue(NUM_NEIGHBOURS, dim=1, keepdim=True).values
    assert torch.equal(linked, nearest | nearest.T)


def test_neighbours_by_hand() -> None:
    line = np.array([[0.0], [1.0], [3.0], [3.5]])
    assert nearest_neighbours(line, 1).tolist() == [[0, 1, 2, 3], [1, 0, 3, 2]]


def test_standardising_undoes_any_stretching_of_a_symmetric_cloud() -> None:
    cloud = np.concatenate([np.eye(3), -np.eye(3)]) * np.sqrt(3)  # mean 0, covariance identity
    stretched = cloud * [5.0, 0.01, 2.0] + [7.0, -300.0, 1.0]
    assert np.abs(standardise(stretched) - cloud).max() < 1e-9


def test_seeds_repeat_and_a_larger_dataset_begins_with_the_smaller(shapes: GraphDataset) -> None:
    start = make_shapes(3, seed=1)
    assert torch.equal(start.features, shapes.features[: len(start.features)])
    assert torch.equal(start.edge_index, shapes.edge_index[:, : start.edge_index.shape[1]])
    assert torch.equal(start.labels, shapes.labels[:30])
    other = make_shapes(3, seed=2)
    assert other.features.shape != start.features.shape or not torch.equal(other.features, start.features)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_per_class": 0}, "num_per_class is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"min_points": 9}, "min_points is 9"),
        ({"min_points": 50, "max_points": 40}, "min_points is 50, max_points 40"),
    ],
)
def test_impossible_requests_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_shapes(**arguments)
