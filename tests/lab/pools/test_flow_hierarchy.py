"""FlowPool in two levels against its formula, written with the library and dense matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from flowpool import flow_pool
from flowpool.lab.pools import POOLS
from flowpool.lab.pools.flow_hierarchy import FlowHierarchyPool

GENERATOR = torch.Generator().manual_seed(0)
NODES = torch.randn(11, 3, generator=GENERATOR, dtype=torch.float64)
BATCH = torch.tensor([0] * 6 + [1] * 5)
# A cycle of six nodes, and a star with four leaves.
LINKS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 6, 6, 6], [1, 2, 3, 4, 5, 0, 7, 8, 9, 10]])
EDGES = torch.cat([LINKS, LINKS.flip(0)], dim=1)


def build(seed: int = 3) -> FlowHierarchyPool:
    pool = POOLS["flow2"](3, 2, seed=seed)
    assert isinstance(pool, FlowHierarchyPool)
    return pool.double()


def test_vector_is_the_two_levels_written_out() -> None:
    pool = build()
    vector = pool(NODES, EDGES, BATCH, 2).vector
    first = flow_pool(NODES, BATCH, reference=pool.coarsen.pool.reference)
    adjacency = torch.zeros(11, 11, dtype=torch.float64)
    adjacency[EDGES[0], EDGES[1]] = 1
    for graph in range(2):
        own = graph == BATCH
        shares = first.plan(graph).T * int(own.sum())  # (N, 2 M)
        coarse = shares.T @ adjacency[own][:, own] @ shares
        scale = coarse.sum(1).rsqrt()
        messages = scale[:, None] * coarse * scale @ first.points[graph] @ pool.convolution.lin.weight.T
        hidden = first.points[graph] + (messages + pool.convolution.bias).relu()
        expected = flow_pool(hidden, reference=pool.layer.reference).points[0]
        torch.testing.assert_close(vector[graph].view(2, 3), expected, rtol=0, atol=1e-7)


def test_gradients_agree_with_finite_differences() -> None:
    pool = build()
    for layer in (pool.coarsen.pool, pool.layer):
        layer.options = type(layer.options)(tolerance=1e-10)
    weights = torch.randn(2, 6, generator=GENERATOR, dtype=torch.float64)
    nodes = NODES.clone().requires_grad_()

    def objective() -> Tensor:
        total: Tensor = (pool(nodes, EDGES, BATCH, 2).vector * weights).sum()
        return total

    leaves = [nodes, pool.convolution.lin.weight, pool.convolution.bias]
    gradients = torch.autograd.grad(objective(), leaves)
    step = 1e-5
    for leaf, gradient in zip(leaves, gradients, strict=True):
        direction = torch.randn(leaf.shape, generator=GENERATOR, dtype=torch.float64)
        with torch.no_grad():
            leaf += step * direction
            ahead = objective()
            leaf -= 2 * step * direction
            behind = objective()
            leaf += step * direction
        expected = (ahead - behind) / (2 * step)
        torch.testing.assert_close((gradient * direction).sum(), expected, rtol=1e-5, atol=1e-7)


def test_the_two_levels_have_references_of_their_own() -> None:
    pool = build()
    assert pool.coarsen.pool.reference.shape == (4, 3)
    assert not torch.equal(pool.coarsen.pool.reference[:2], pool.layer.reference)
    assert not torch.equal(build(4).layer.reference, pool.layer.reference)
