"""The pooler of torch-geometric-pool: the coarse graphs of FlowCoarsen, in all the forms that the library knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("tgp", reason="torch-geometric-pool is not installed")
pytest.importorskip("torch_scatter", reason="torch_scatter, which torch-geometric-pool imports, is not installed")

from tgp.poolers import get_pooler  # noqa: E402
from torch_geometric.utils import to_dense_adj, to_dense_batch  # noqa: E402

from flowpool import FlowCoarsen  # noqa: E402
from flowpool.tgp import FlowPooling  # noqa: E402

PLAIN = {"remove_self_loops": False, "degree_norm": False, "adj_transpose": False}
BATCH = torch.tensor([0] * 5 + [1] * 7 + [2] * 6)


def graphs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three paths with weights."""
    generator = torch.Generator().manual_seed(0)
    here = torch.tensor([k for k in range(17) if BATCH[k] == BATCH[k + 1]])
    both = torch.stack([torch.stack([here, here + 1]), torch.stack([here + 1, here])], -1)  # (2, E / 2, 2)
    edges = both.flatten(1)  # graph after graph, as the library wants them
    weights = torch.rand(len(here), generator=generator, dtype=dtype).add(0.5).repeat_interleave(2)
    return torch.randn(len(BATCH), 3, generator=generator, dtype=dtype), edges, weights


def coarse() -> Any:
    x, edges, weights = graphs()
    return FlowCoarsen(in_channels=3, num_points=2)(x, edges, weights, BATCH)


def test_it_is_found_by_name() -> None:
    pooler = get_pooler("flow", in_channels=3, k=2, dropout=0.1)  # the library drops what a pooler does not know
    assert isinstance(pooler, FlowPooling)
    assert pooler.batched and not get_pooler("flow_u", in_channels=3, k=2).batched
    assert "batched=True" in repr(pooler)
    assert not pooler.is_trainable and pooler.is_dense and not pooler.has_loss


@pytest.mark.parametrize("batched", [True, False])
def test_padded_output_is_that_of_flow_coarsen(batched: bool) -> None:
    x, edges, weights = graphs()
    out = FlowPooling(3, 2, batched=batched, **PLAIN)(x, edges, weights, batch=BATCH)
    expected = coarse()
    torch.testing.assert_close(out.x, expected.x.view(3, 2, 3))
    torch.testing.assert_close(out.edge_index, expected.adjacency)
    assert out.so.is_expressive
    shares = out.so.s[out.so.in_mask] if batched else out.so.s
    torch.testing.assert_close(shares, expected.assignment)


@pytest.mark.parametrize("batched", [True, False])
def test_sparse_output_is_one_graph(batched: bool) -> None:
    x, edges, weights = graphs()
    out = FlowPooling(3, 2, batched=batched, sparse_output=True, **PLAIN)(x, edges, weights, batch=BATCH)
    expected = coarse()
    torch.testing.assert_close(out.x, expected.x)
    assert out.batch.tolist() == [0, 0, 1, 1, 2, 2]
    found = to_dense_adj(out.edge_index, out.batch, out.edge_weight)
    torch.testing.assert_close(found, expected.adjacency)


def test_padded_input_is_the_same_as_sparse_input() -> None:
    x, edges, weights = graphs()
    dense, mask = to_dense_batch(x, BATCH)
    adjacency = to_dense_adj(edges, BATCH, weights)
    dense = dense.masked_fill(~mask.unsqueeze(-1), 7.0)  # whatever stands in the padding
    out = FlowPooling(3, 2, **PLAIN)(dense, adjacency, mask=mask)
    torch.testing.assert_close(out.x, coarse().x.view(3, 2, 3))
    torch.testing.assert_close(out.edge_index, coarse().adjacency)
    assert bool((out.so.s[~mask] == 0).all())


@pytest.mark.parametrize("batched", [True, False])
def test_self_loops_and_degrees(batched: bool) -> None:
    x, edges, weights = graphs()
    out = FlowPooling(3, 2, batched=batched, remove_self_loops=True, degree_norm=True)(x, edges, weights, batch=BATCH)
    # Two points without loops: one edge, which the degrees normalise to one.
    expected = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=x.dtype).expand(3, 2, 2)
    torch.testing.assert_close(out.edge_index, expected)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("sparse_output", [True, False])
def test_lifting_gives_each_node_the_average_of_its_points(batched: bool, sparse_output: bool) -> None:
    x, edges, weights = graphs()
    pooler = FlowPooling(3, 2, batched=batched, sparse_output=sparse_output)
    out = pooler(x, edges, weights, batch=BATCH)
    lifted = pooler(out.x, so=out.so, batch=BATCH, batch_pooled=out.batch, lifting=True)
    if lifted.dim() == 3:
        lifted = lifted[out.so.in_mask]
    torch.testing.assert_close(lifted, coarse().lift(coarse().x))


@pytest.mark.parametrize("batched", [True, False])
def test_gradients_reach_nodes_and_edge_weights(batched: bool) -> None:
    x, edges, weights = graphs()
    pooler = FlowPooling(3, 2, batched=batched, **PLAIN)
    cotangent = torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(1), dtype=x.dtype)

    def loss(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = pooler(x, edges, weights, batch=BATCH)
        return (out.edge_index * cotangent).sum() + out.x.square().sum()

    leaves = [x.requires_grad_(), weights.requires_grad_()]
    gradients = torch.autograd.grad(loss(*leaves), leaves)
    for place in range(2):
        direction = torch.randn(leaves[place].shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype)
        with torch.no_grad():
            ahead, behind = (
                loss(*(v + s * 1e-4 * direction if k == place else v for k, v in enumerate(leaves))) for s in (1, -1)
            )
        assert float((gradients[place] * direction).sum()) == pytest.approx(float(ahead - behind) / 2e-4, rel=1e-4)


def test_lifting_needs_what_select_gave() -> None:
    with pytest.raises(ValueError, match="Lifting needs so"):
        FlowPooling(3, 2)(torch.zeros(2, 3), lifting=True)
