"""Backbones against dense matrices."""

import numpy as np
import pytest
import torch
from torch import Tensor

from flowpool.lab.backbones import GIN, GINE, build_backbone, prepare, propagate
from flowpool.lab.datasets import GraphDataset, load_dataset, make_shapes
from flowpool.lab.leakproof import subset


def two_graphs() -> GraphDataset:
    """A path of three nodes, and a pair beside a node without neighbours."""
    return GraphDataset(
        name="TWO",
        features=torch.randn(6, 4, generator=torch.Generator().manual_seed(0)),
        node_ptr=torch.tensor([0, 3, 6]),
        edge_index=torch.tensor([[0, 1, 1, 2, 0, 1], [1, 0, 2, 1, 1, 0]]),
        edge_ptr=torch.tensor([0, 4, 6]),
        labels=torch.tensor([0, 1]),
        class_names=("a", "b"),
    )


def dense_adjacency(dataset: GraphDataset) -> Tensor:
    matrix = torch.zeros(len(dataset.features), len(dataset.features), dtype=torch.float64)
    for graph in range(len(dataset)):
        for one, other in dataset[graph].edge_index.T.tolist():
            matrix[dataset.node_ptr[graph] + one, dataset.node_ptr[graph] + other] = 1
    return matrix


@pytest.mark.parametrize("dataset", [two_graphs(), subset(load_dataset("MUTAG"), np.arange(9))], ids=["two", "MUTAG"])
def test_propagation_is_the_power_of_the_dense_matrix(dataset: GraphDataset) -> None:
    loops = dense_adjacency(dataset) + torch.eye(len(dataset.features))
    root = torch.diag(loops.sum(1).rsqrt())
    for matrix, propagation in ((root @ loops @ root, "normalised"), (loops, "raw")):
        expected = (matrix @ matrix @ dataset.features.double()).float()
        torch.testing.assert_close(propagate(dataset, propagation), expected)  # type: ignore[arg-type]


def test_propagation_is_done_once_and_the_rest_of_sgc_is_one_linear_layer() -> None:
    dataset = two_graphs()
    prepared = prepare(dataset, "sgc", "raw")
    assert torch.equal(prepared.features, propagate(dataset, "raw"))
    assert torch.equal(prepared.edge_index, dataset.edge_index)
    backbone = build_backbone("sgc", 4, 3)
    weight, bias = backbone.parameters()
    nodes = backbone(prepared.features, prepared.edge_index)
    torch.testing.assert_close(nodes, prepared.features @ weight.T + bias)


def test_gin_sums_a_node_and_its_neighbours_before_each_of_two_mlps() -> None:
    dataset = two_graphs()
    gin = build_backbone("gin", 4, 5).eval()
    assert isinstance(gin, GIN)
    assert len(gin.layers) == 2
    batch = dataset.batch([0, 1])
    expected = batch.x
    matrix = (dense_adjacency(dataset) + torch.eye(6)).float()
    for layer in gin.layers:
        expected = layer.nn(matrix @ expected)
    torch.testing.assert_close(gin(batch.x, batch.edge_index), expected)


def test_gine_sums_what_an_edge_lets_through() -> None:
    """On two nodes that are joined by an edge in one direction, whose features are added before the relu."""
    torch.manual_seed(0)
    gine = build_backbone("gine", 4, 5, 1, edge_channels=2).eval()
    assert isinstance(gine, GINE)
    x, bond = torch.randn(2, 4), torch.randn(1, 2)
    (layer,) = gine.layers
    start = gine.linear(x)
    message = (start[0] + layer.lin(bond[0])).clamp(min=0)
    expected = layer.nn(start + torch.stack([torch.zeros(5), message]))
    torch.testing.assert_close(gine(x, torch.tensor([[0], [1]]), bond), expected)


def test_gine_wants_features_of_edges() -> None:
    with pytest.raises(ValueError, match="no features, which the backbone gine needs"):
        build_backbone("gine", 4, 5)


def test_deep_sets_see_each_member_by_itself() -> None:
    dataset = two_graphs()
    batch = prepare(dataset, "sets", None).batch([1, 0])
    assert batch.edge_index.shape == (2, 0)
    backbone = build_backbone("sets", 4, 3)
    first, _, second = backbone.layers
    expected = second((first(batch.x)).clamp(min=0))
    torch.testing.assert_close(backbone(batch.x, batch.edge_index), expected)
    assert float((expected - (expected[0] + (batch.x - batch.x[0]) @ (second.weight @ first.weight).T)).abs().max()) > 0


def test_the_blind_baseline_sees_no_edge_and_each_node_by_itself() -> None:
    dataset = two_graphs()
    prepared = prepare(dataset, "blind", None)
    batch = prepared.batch([1, 0])
    assert batch.edge_index.shape == (2, 0)
    backbone = build_backbone("blind", 4, 3)
    together = backbone(batch.x, batch.edge_index)
    weight, bias = backbone.parameters()
    torch.testing.assert_close(together, (batch.x @ weight.T + bias).clamp(min=0))


def test_the_linear_backbone_leaves_a_mean_blind_for_shapes() -> None:
    """Clouds with the same mean and covariance: after a linear layer their means are equal, the clouds are not."""
    prepared = prepare(make_shapes(1), "linear", None)
    assert prepared.edge_index.shape == (2, 0)
    batch = prepared.batch(range(10))
    torch.manual_seed(0)
    nodes = build_backbone("linear", 3, 4)(batch.x, batch.edge_index)
    means = torch.stack([nodes[batch.batch == graph].mean(0) for graph in range(10)])
    torch.testing.assert_close(means, means[:1].expand(10, -1), atol=1e-5, rtol=0)
    largest = torch.stack([nodes[batch.batch == graph].amax(0) for graph in range(10)])
    assert float(largest.std(0).min()) > 0.05


def test_gin_gets_the_dataset_as_it_is() -> None:
    dataset = two_graphs()
    assert prepare(dataset, "gin", None) is dataset


@pytest.mark.parametrize(
    ("backbone", "propagation", "message"),
    [
        ("gcn", None, "Unknown backbone 'gcn'; there are sgc, gin, gine, blind"),
        ("sgc", None, "sgc has normalised, raw"),
        ("gin", "raw", "belongs to the backbone sgc; gin has none"),
    ],
)
def test_what_does_not_fit_is_refused(backbone: str, propagation: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(two_graphs(), backbone, propagation)  # type: ignore[arg-type]
