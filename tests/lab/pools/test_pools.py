"""What every pooling method of the bench must do, whatever it computes."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from flowpool.lab.pools import POOLS, PointPool, Pool

CHANNELS, POINTS = 4, 5
VECTOR_SIZE = {
    "mean": 4,
    "sum": 4,
    "max": 4,
    "gmt": 4,
    "tw": 8,
    "tfgw": 8,
    "flow-free": 25,
    "flow-step": 40,
    "flow-readout": 69,
    "sum+mean+max": 12,
    "mean-deviations": 8,
    "vpa": 4,
    "pna": 48,
    "attention": 16,
    "set2set": 8,
    "equilibrium": 4,
    "fsw": 16,
    "ot-gnn": 8,
}  # the others: POINTS * CHANNELS
NODE_FILLED = {"sort", "topk", "sag", "haar"}  # one row needs one node
FLOWS = {"flow", "flow-attention", "flow-kmeans", "flow-mahalanobis"}
CLUSTERED = {"mincut", "struct", "otke", "wegl"} | FLOWS  # every row exists in every graph
WITHOUT_DRAWS = {"mean", "sum", "max", "sum+mean+max", "mean-deviations", "vpa", "pna", "sort", "haar"} | {
    "wegl"
}  # k-means may agree
EVERY_POOL = sorted(POOLS)


class Graphs(NamedTuple):
    x: Tensor
    edge_index: Tensor
    batch: Tensor
    num_graphs: int


def random_graphs(sizes: list[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> Graphs:
    """Random trees with a few more edges, connected, as asymmetric as their size allows."""
    generator = torch.Generator().manual_seed(seed)
    edges, offset = [], 0
    for size in sizes:
        links = {(int(torch.randint(child, (), generator=generator)), child) for child in range(1, size)}
        for _ in range(size // 2):
            one, other = sorted(torch.randint(size, (2,), generator=generator).tolist())
            if one != other:
                links.add((one, other))
        edges += [(a + offset, b + offset) for a, b in sorted(links)]
        offset += size
    forward = torch.tensor(edges, dtype=torch.long).reshape(-1, 2).T
    return Graphs(
        torch.randn(offset, CHANNELS, generator=generator, dtype=dtype),
        torch.cat([forward, forward.flip(0)], dim=1),
        torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
        len(sizes),
    )


def single(graphs: Graphs, index: int) -> Graphs:
    nodes = (graphs.batch == index).nonzero().view(-1)
    own = graphs.batch[graphs.edge_index[0]] == index
    return Graphs(graphs.x[nodes], graphs.edge_index[:, own] - nodes[0], torch.zeros_like(nodes), 1)


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 3) -> Pool:
    pool = POOLS[name](CHANNELS, POINTS, seed=seed)
    training = random_graphs([9, 9, 9], seed=11)
    pool.fit(training.x, training.batch)
    return pool.to(dtype)


@pytest.mark.parametrize("name", EVERY_POOL)
def test_vector_has_the_promised_size_for_small_and_large_graphs(name: str) -> None:
    graphs = random_graphs([1, 2, 3, 12])
    pool = build(name)
    readout = pool(*graphs)
    assert pool.out_channels == VECTOR_SIZE.get(name, POINTS * CHANNELS)
    assert readout.vector.shape == (4, pool.out_channels)
    assert readout.vector.dtype == torch.float32
    assert bool(readout.vector.isfinite().all())
    assert readout.loss.shape == ()
    assert bool(readout.loss.isfinite())


@pytest.mark.parametrize("name", sorted(set(EVERY_POOL) - {"haar"}))
def test_numbering_of_nodes_and_edges_does_not_matter(name: str) -> None:
    """Haar promises it up to symmetries of the graph, which test_haar.py tests."""
    graphs = random_graphs([13, 9, 4])
    generator = torch.Generator().manual_seed(5)
    order = torch.cat([torch.randperm(13, generator=generator), 13 + torch.randperm(9, generator=generator),
                       22 + torch.randperm(4, generator=generator)])  # fmt: skip
    new_number = torch.empty_like(order)
    new_number[order] = torch.arange(len(order))
    edges = new_number[graphs.edge_index][:, torch.randperm(graphs.edge_index.shape[1], generator=generator)]
    pool = build(name)
    before = pool(*graphs)
    after = pool(graphs.x[order], edges, graphs.batch, graphs.num_graphs)
    torch.testing.assert_close(after.vector, before.vector, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after.loss, before.loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", EVERY_POOL)
def test_company_in_the_batch_does_not_matter(name: str) -> None:
    graphs = random_graphs([3, 17, 1, 8])
    pool = build(name).eval()
    together = pool(*graphs).vector
    alone = torch.cat([pool(*single(graphs, index)).vector for index in range(4)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", EVERY_POOL)
def test_graphs_without_edges(name: str) -> None:
    graphs = random_graphs([6, 2])._replace(edge_index=torch.empty(2, 0, dtype=torch.long))
    readout = build(name)(*graphs)
    assert bool(readout.vector.isfinite().all())
    assert bool(readout.loss.isfinite())


@pytest.mark.parametrize("name", EVERY_POOL)
def test_the_seed_alone_decides_and_random_state_is_left_alone(name: str) -> None:
    graphs = random_graphs([7, 10])
    torch.manual_seed(20)
    state = torch.random.get_rng_state()
    first = build(name, seed=1)(*graphs).vector
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(21)
    assert torch.equal(build(name, seed=1)(*graphs).vector, first)
    has_draws = name not in WITHOUT_DRAWS
    assert not has_draws or not torch.equal(build(name, seed=2)(*graphs).vector, first)


@pytest.mark.parametrize("name", sorted(NODE_FILLED | CLUSTERED))
def test_cloud_is_the_vector_before_flattening_and_masks_rows_without_a_node(name: str) -> None:
    graphs = random_graphs([2, 12])
    pool = build(name)
    assert isinstance(pool, PointPool)
    cloud = pool.points(*graphs)
    assert cloud.points.shape == (2, POINTS, CHANNELS)
    rows = 2 if name in NODE_FILLED else POINTS
    assert cloud.mask.tolist() == [[row < rows for row in range(POINTS)], [True] * POINTS]
    assert bool((cloud.points[~cloud.mask] == 0).all())
    if name == "otke":  # its vector holds kernel features, see test_otke.py
        return
    vector = pool(*graphs).vector.view(2, POINTS, CHANNELS)
    if name == "wegl":
        vector = vector * math.sqrt(POINTS) + pool.reference
    torch.testing.assert_close(cloud.points, vector)


def test_exactly_the_listed_pools_give_clouds() -> None:
    assert {name for name in POOLS if isinstance(build(name), PointPool)} >= NODE_FILLED | CLUSTERED
    others = set(EVERY_POOL) - NODE_FILLED - CLUSTERED
    assert not any(isinstance(build(name), PointPool) for name in others)


@pytest.mark.parametrize("name", sorted(set(EVERY_POOL) - {"wegl", "tfgw", "flow-deviations", "flow2"} - FLOWS))
def test_gradients_agree_with_finite_differences(name: str) -> None:
    """Along random directions in nodes and parameters at once.

    tfgw is single precision only, wegl frozen, and flow is as exact as its tolerance: the library tests it.
    """
    graphs = random_graphs([9, 3, 6], dtype=torch.float64)
    pool = build(name, torch.float64)
    generator = torch.Generator().manual_seed(2)
    nodes = graphs.x.clone().requires_grad_()
    leaves = [nodes, *pool.parameters()]
    weights = torch.randn(3, pool.out_channels, generator=generator, dtype=torch.float64)

    def objective() -> Tensor:
        readout = pool(nodes, *graphs[1:])
        total: Tensor = (readout.vector * weights).sum() + 0.7 * readout.loss
        return total

    gradients = torch.autograd.grad(objective(), leaves, allow_unused=True)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        # A direction per leaf, so that no leaf hides behind a larger one.
        direction = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
        start, step = leaf.detach().clone(), 1e-6
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                leaf.copy_(start + sign * step * direction)
                values.append(objective())
            leaf.copy_(start)
        difference = (values[0] - values[1]) / (2 * step)
        slope = torch.zeros(()).double() if gradient is None else (gradient * direction).sum()
        torch.testing.assert_close(slope, difference, rtol=1e-5, atol=1e-6)


def test_tfgw_gradients_are_finite_and_reach_templates() -> None:
    graphs = random_graphs([9, 3, 6])
    pool = build("tfgw")
    nodes = graphs.x.clone().requires_grad_()
    pool(nodes, *graphs[1:]).vector.sum().backward()
    gradients = [nodes.grad, *(parameter.grad for parameter in pool.parameters())]
    for gradient in gradients:
        assert gradient is not None
        assert bool(gradient.isfinite().all())
        assert float(gradient.abs().max()) > 0


@pytest.mark.parametrize(
    ("batch", "num_graphs", "message"),
    [
        ([0, 0, 1], 2, "batch has shape"),
        ([0, 1, 0, 1], 2, "not sorted .first: node 2"),
        ([0, 0, 2, 2], 3, "graph 1 has no nodes"),
        ([0, 0, 1, 1], 3, "graph 2 has no nodes"),
        ([0, 1, 2, 3], 3, "names graph 3 but num_graphs is 3"),
    ],
)
def test_wrong_batches_are_refused(batch: list[int], num_graphs: int, message: str) -> None:
    x, edge_index = torch.randn(4, CHANNELS), torch.empty(2, 0, dtype=torch.long)
    sort = build("sort")
    assert isinstance(sort, PointPool)
    for entry in (sort, sort.points):
        with pytest.raises(ValueError, match=message):
            entry(x, edge_index, torch.tensor(batch), num_graphs)
