"""The dataset record: single graphs, batches, and what is refused."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from flowpool.lab.datasets.record import GraphDataset, both_directions, offsets


def path_graphs(sizes: list[int]) -> GraphDataset:
    """Path graphs 0 - 1 - ... - (n-1); node i of graph g has the feature (g, i)."""
    features = [[float(graph), float(node)] for graph, size in enumerate(sizes) for node in range(size)]
    edges = [both_directions(np.array([(i, i + 1) for i in range(n - 1)], np.int64).reshape(-1, 2), n) for n in sizes]
    return GraphDataset(
        name="paths",
        features=torch.tensor(features),
        node_ptr=offsets(np.array(sizes)),
        edge_index=torch.from_numpy(np.concatenate(edges, axis=1)),
        edge_ptr=offsets(np.array([pairs.shape[1] for pairs in edges])),
        labels=torch.arange(len(sizes)) % 2,
        class_names=("even", "odd"),
    )


def test_a_single_graph_counts_its_nodes_from_zero() -> None:
    dataset = path_graphs([3, 1, 4])
    x, edge_index, y, _ = dataset[2]
    assert x.tolist() == [[2, 0], [2, 1], [2, 2], [2, 3]]
    assert edge_index.tolist() == [[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]
    assert y == 0
    assert dataset[1].edge_index.shape == (2, 0)
    assert torch.equal(dataset[-1].x, x)
    assert [len(graph.x) for graph in dataset] == [3, 1, 4]


@pytest.mark.parametrize("kind", [list, np.array, np.uint8, torch.tensor])
@pytest.mark.parametrize("indices", [[2, 0, 1], [1, 1, 2], [0]])
def test_a_batch_is_its_graphs_side_by_side(indices: list[int], kind: Callable) -> None:
    dataset = path_graphs([3, 1, 4])
    x, edge_index, batch, y, _ = dataset.batch(kind(indices))
    start = 0
    for position, index in enumerate(indices):
        graph = dataset[index]
        members = (batch == position).nonzero()[:, 0]
        assert members.tolist() == list(range(start, start + len(graph.x)))
        assert torch.equal(x[members], graph.x)
        inside = batch[edge_index[0]] == position
        assert torch.equal(edge_index[:, inside] - start, graph.edge_index)
        assert int(y[position]) == graph.y
        start += len(graph.x)
    assert len(x) == len(batch) == start


def test_an_empty_batch_keeps_its_shapes() -> None:
    x, edge_index, batch, y, _ = path_graphs([3, 1]).batch([])
    assert (x.shape, edge_index.shape, batch.shape, y.shape) == ((0, 2), (2, 0), (0,), (0,))


def test_graph_numbers_outside_of_the_dataset_are_named() -> None:
    dataset = path_graphs([3, 1, 4])
    with pytest.raises(IndexError, match=r"2 graph numbers are outside 0\.\.2 .*first: entry 1, 3"):
        dataset.batch([0, 3, -1])
    with pytest.raises(IndexError, match="no graph 3"):
        dataset[3]


@pytest.mark.parametrize("indices", [[0.5], [True, False, True], [[0, 1]]])
def test_something_else_than_graph_numbers_is_refused(indices: list) -> None:
    with pytest.raises(ValueError, match="graph numbers"):
        path_graphs([3, 1, 4]).batch(indices)


def test_edges_become_distinct_and_symmetric() -> None:
    edges = np.array([[2, 1], [2, 1], [0, 2], [2, 0], [1, 1]])
    assert both_directions(edges, 3).tolist() == [[0, 1, 1, 2, 2], [2, 1, 2, 0, 1]]
    assert both_directions(np.empty((0, 2), np.int64), 3).shape == (2, 0)
