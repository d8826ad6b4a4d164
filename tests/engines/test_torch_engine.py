from dataclasses import replace

import pytest
import torch

from flowpool import flow_pool
from flowpool.core import sinkhorn
from flowpool.core.measures import make_clouds
from flowpool.costs import Geometry, SquaredEuclidean
from flowpool.engines import torch_engine as batching
from flowpool.engines.torch_engine import Framed

SIZES = [3, 9, 4, 17, 8, 30, 5, 16]


def problem(graphs):
    generator = torch.Generator().manual_seed(0)
    clouds = [torch.randn(size, 2, generator=generator, dtype=torch.float64) for size in SIZES]
    batch = torch.cat([torch.full((SIZES[g],), place) for place, g in enumerate(graphs)])
    nodes = torch.cat([clouds[g] for g in graphs])
    start = torch.tensor([[0.0, 1.0], [1.0, -1.0], [-1.0, 0.2]], dtype=torch.float64).expand(len(graphs), 3, 2)
    level = torch.full((len(graphs),), 0.3, dtype=torch.float64)
    uniform = torch.full((3,), 1 / 3, dtype=torch.float64)
    return Framed(make_clouds(nodes, batch)[0], start, uniform, level, Geometry(SquaredEuclidean()), True)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 31, 33, 63, 100, 300, 1000, 4096, 4097, 5748])
def test_padding_is_modest_and_depends_on_the_size_alone(size):
    padded = batching.padded_size(size)
    assert size <= padded <= max(size + 31, 1.25 * size + 1)


def test_buckets_hold_every_node_of_every_graph_once():
    seen = {}
    whole = problem(range(8))
    for bucket in batching.buckets(whole):
        assert len(bucket.graphs) >= 2
        assert torch.allclose(bucket.energy.masses.sum(-1), torch.ones(len(bucket.graphs), dtype=torch.float64))
        for graph, row, fresh in zip(bucket.graphs.tolist(), bucket.gather, bucket.fresh, strict=True):
            if fresh:
                seen[graph] = row[row < len(whole.clouds.nodes)].tolist()
    assert sorted(seen) == list(range(8))
    assert sum((seen[g] for g in range(8)), []) == list(range(sum(SIZES)))


def test_results_have_the_same_bits_in_any_company():
    together = problem(range(8))
    whole = batching.solve_framed(together, 1e-8, 500)
    upstream = torch.randn(8, 3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = batching.adjoint_framed(together, whole, upstream, 1e-12, {"nodes", "masses"})
    for group in ([0], [5], [3, 1], [7, 6, 2], [4, 0, 5, 3, 1]):
        part = problem(group)
        ended = batching.solve_framed(part, 1e-8, 500)
        for one, other in zip(ended, whole, strict=True):
            assert torch.equal(one, other[group])
        back = batching.adjoint_framed(part, ended, upstream[group], 1e-12, {"nodes", "masses"})
        rows = torch.cat([torch.arange(*together.clouds.ptr[g : g + 2].tolist()) for g in group])
        assert torch.equal(back.nodes, gradients.nodes[rows])
        assert torch.equal(back.masses, gradients.masses[rows])


@pytest.mark.parametrize(("num_points", "dim"), [(5, 3), (3, 7), (1, 1), (5, 8), (4, 5), (7, 6)])
def test_odd_sizes_have_the_same_bits_in_any_company(num_points, dim):
    """Matrices of odd size would be rounded by their place in the batch."""
    generator = torch.Generator().manual_seed(dim)
    sizes = torch.randint(1, 40, (24,), generator=generator).tolist()
    clouds = [torch.randn(size, dim, generator=generator, dtype=torch.float64) for size in sizes]
    reference = torch.randn(num_points, dim, generator=generator, dtype=torch.float64)
    upstream = torch.randn(24, num_points, dim, generator=generator, dtype=torch.float64)

    def pooled(graphs):
        nodes = torch.cat([clouds[g] for g in graphs]).requires_grad_()
        batch = torch.arange(len(graphs)).repeat_interleave(torch.tensor([sizes[g] for g in graphs]))
        found = flow_pool(nodes, batch, reference=reference, epsilon=0.3, engine="torch", on_failure="ignore")
        (gradient,) = torch.autograd.grad(found.points, nodes, upstream[graphs])
        return found, gradient.split([sizes[g] for g in graphs])

    whole, gradients = pooled(list(range(24)))
    for count in (1, 2, 7, 16, 24):
        graphs = torch.randperm(24, generator=generator)[:count].tolist()
        part, own = pooled(graphs)
        assert torch.equal(part.points, whole.points[graphs])
        assert torch.equal(part.residual, whole.residual[graphs]) and torch.equal(part.steps, whole.steps[graphs])
        assert all(torch.equal(gradient, gradients[g]) for gradient, g in zip(own, graphs, strict=True))


def test_looking_less_often_changes_no_bit(monkeypatch):
    """As on devices for which the host would have to wait."""
    often = batching.solve_framed(problem(range(8)), 1e-8, 500)
    monkeypatch.setattr(sinkhorn, "looks_every", lambda device: 3)
    seldom = batching.solve_framed(problem(range(8)), 1e-8, 500)
    assert all(torch.equal(one, other) for one, other in zip(often, seldom, strict=True))


def test_judging_moves_nothing():
    here = problem(range(3))
    judged = batching.judge(here)
    assert torch.equal(judged.points, here.start)
    assert (judged.residual > 0).all()
    ended = batching.solve_framed(here, 1e-10, 500)
    at_rest = batching.judge(replace(here, start=ended.points))
    assert at_rest.residual.max() < 1e-9
