"""Padding: rows of zeros after the nodes, which weigh nothing or as much as a node."""

import pytest
import torch
from torch import Tensor

from flowpool import flow_pool
from flowpool.lab.backbones import prepare
from flowpool.lab.datasets import GraphBatch, load_dataset
from flowpool.lab.model import GraphModel, build_model
from flowpool.lab.names import POOLS, Padding
from flowpool.lab.options import Shape
from flowpool.lab.padding import pad

SIZES = [2, 4, 1]
BATCH = torch.repeat_interleave(torch.arange(3), torch.tensor(SIZES))
NODES = torch.arange(1.0, 15.0).view(7, 2)
EDGES = torch.tensor([[0, 1, 2, 5], [1, 0, 5, 2]])


def test_rows_of_zeros_follow_the_nodes_of_each_graph() -> None:
    padded = pad(NODES, EDGES, BATCH, 3, 5)
    assert padded.batch.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert padded.is_node.view(3, 5).sum(1).tolist() == SIZES
    assert torch.equal(padded.nodes[padded.is_node], NODES)
    assert not padded.nodes[~padded.is_node].any()
    assert padded.edge_index.tolist() == [[0, 1, 5, 8], [1, 0, 8, 5]]


def test_a_graph_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="A graph has 4 nodes; it cannot be padded to 3"):
        pad(NODES, EDGES, BATCH, 3, 3)


def sample() -> GraphBatch:
    return prepare(load_dataset("MUTAG"), "sgc", "normalised").batch([3, 50, 120, 7])


def model_of(pool: str, padding: Padding) -> GraphModel:
    model = build_model(pool, Shape(padding=padding), 7, 2, 0, largest=28)
    model.fit(sample())
    return model.eval()


def nodes_of(model: GraphModel) -> Tensor:
    part = sample()
    nodes: Tensor = model.backbone(part.x, part.edge_index)
    return nodes


def vector(model: GraphModel) -> Tensor:
    part = sample()
    return model._pooled(nodes_of(model), part.edge_index, part.batch, 4).vector.detach()


@pytest.mark.parametrize("pool", sorted(POOLS))
def test_rows_without_mass_change_nothing(pool: str) -> None:
    torch.testing.assert_close(vector(model_of(pool, "empty")), vector(model_of(pool, "none")), rtol=1e-4, atol=1e-5)


def test_rows_with_mass_are_nodes_at_the_origin() -> None:
    """By hand: a mean over 28 rows, the same sum, zeros in a sort, and a flow to a cloud with zeros in it."""
    part = sample()
    for pool in ("sum", "mean", "sort", "flow"):
        model = model_of(pool, "mass")
        nodes = nodes_of(model)
        rows = []
        for graph in range(4):
            own = nodes[part.batch == graph]
            dense = torch.cat([own, own.new_zeros(28 - len(own), 8)])
            if pool == "sum":
                rows.append(own.sum(0))
            elif pool == "mean":
                rows.append(own.sum(0) / 28)
            elif pool == "sort":
                rows.append(dense[dense[:, -1].argsort(descending=True, stable=True)[:5]].flatten())
            else:
                rows.append(flow_pool(dense, reference=model.pool.layer.reference).points.flatten())  # type: ignore[union-attr]
        torch.testing.assert_close(vector(model), torch.stack(rows).detach(), rtol=1e-4, atol=1e-5)


def test_flow_gradients_with_rows_without_mass_are_those_without_the_rows() -> None:
    part, found = sample(), []
    for padding in ("none", "empty"):
        model = model_of("flow", padding)  # type: ignore[arg-type]
        model(part.x, part.edge_index, part.batch, 4).outputs.square().sum().backward()
        found.append([weight.grad for weight in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
