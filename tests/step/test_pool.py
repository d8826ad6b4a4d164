"""What a reference receives, with equal and with free masses: closed forms, POT, limits and gradients."""

import numpy as np
import ot
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch.autograd import gradcheck

from flowpool import flow_pool
from flowpool.step import ragged
from flowpool.step.pool import transport_pool


def free_pool(*arguments, **options):
    return transport_pool(*arguments, free=True, **options)


GENERATOR = torch.Generator().manual_seed(0)
NODES = torch.randn(11, 2, generator=GENERATOR, dtype=torch.float64)
BATCH = torch.tensor([0] * 6 + [2] * 5)  # graph 1 is empty
MASSES = torch.rand(11, generator=GENERATOR, dtype=torch.float64) + 0.3
POINTS = torch.randn(4, 2, generator=GENERATOR, dtype=torch.float64)


def by_definition(nodes, masses, points, epsilon):
    """Shares and barycentres of one graph in numpy."""
    weights = masses / masses.sum()
    kernel = np.exp(-((points[:, None] - nodes[None]) ** 2).sum(-1) / epsilon)  # (M, N)
    plan = kernel / kernel.sum(0) * weights
    shares = plan.sum(1)
    return shares, plan @ nodes / shares[:, None]


def test_shares_and_means_against_their_definition():
    order = torch.randperm(11, generator=GENERATOR)
    found = free_pool(NODES[order], BATCH[order], points=POINTS, epsilon=0.7, masses=MASSES[order])
    for graph in (0, 2):
        own = graph == BATCH
        shares, means = by_definition(NODES[own].numpy(), MASSES[own].numpy(), POINTS.numpy(), 0.7)
        np.testing.assert_allclose(found.masses[graph], shares, rtol=1e-12)
        np.testing.assert_allclose(found.points[graph], means, rtol=1e-10)
    by_offsets = free_pool(NODES, ptr=torch.tensor([0, 6, 6, 11]), points=POINTS, epsilon=0.7, masses=MASSES)
    assert torch.allclose(by_offsets.points, found.points, rtol=1e-12)


def test_the_plan_minimises_the_objective_with_only_the_marginal_of_the_nodes_kept():
    """Any other plan with the same column sums costs more; the shares are its row sums."""
    nodes, points, epsilon = NODES[:6].numpy(), POINTS.numpy(), 0.7
    cost = ((points[:, None] - nodes[None]) ** 2).sum(-1)

    def objective(plan):
        return (plan * cost).sum() + epsilon * (plan * np.log(plan * 4 * 6)).sum()

    kernel = np.exp(-cost / epsilon)
    best = kernel / kernel.sum(0) / 6
    np.testing.assert_allclose(free_pool(NODES[:6], points=POINTS, epsilon=epsilon).masses[0], best.sum(1))
    generator = np.random.default_rng(0)
    for _ in range(20):
        other = best * np.exp(0.1 * generator.standard_normal(best.shape))
        assert objective(other / other.sum(0) / 6) > objective(best)


def test_a_large_epsilon_gives_every_point_the_mean():
    found = free_pool(NODES, BATCH, points=POINTS, epsilon=1e9, masses=MASSES)
    assert torch.allclose(found.masses[[0, 2]], torch.full((2, 4), 0.25).double(), atol=1e-8)
    for graph in (0, 2):
        own = graph == BATCH
        mean = (MASSES[own, None] * NODES[own]).sum(0) / MASSES[own].sum()
        assert torch.allclose(found.points[graph], mean.expand(4, 2), atol=1e-7)


def test_a_small_epsilon_counts_the_nodes_nearest_to_each_point():
    points = torch.cat([POINTS, torch.tensor([[50.0, 50.0]]).double()])  # nobody is near the last one
    found = free_pool(NODES, BATCH, points=points, epsilon=1e-4)
    for graph in (0, 2):
        nodes = NODES[graph == BATCH].numpy()
        nearest = ((nodes[:, None] - points.numpy()) ** 2).sum(-1).argmin(1)
        counts = np.bincount(nearest, minlength=5)
        np.testing.assert_allclose(len(nodes) * found.masses[graph], counts, atol=1e-9)
        means = [nodes[nearest == i].mean(0) if counts[i] else points[i].numpy() for i in range(5)]
        np.testing.assert_allclose(found.points[graph], means, atol=1e-8)


def test_the_mean_of_the_graph_is_in_the_output():
    found = free_pool(NODES, BATCH, points=POINTS, epsilon=0.7, masses=MASSES)
    mean = (found.masses.unsqueeze(-1) * found.points).sum(1)
    own = BATCH == 2
    assert torch.allclose(mean[2], (MASSES[own, None] * NODES[own]).sum(0) / MASSES[own].sum())


def test_empty_graphs_receive_nothing_and_trouble_stays_in_its_graph():
    found = free_pool(NODES, BATCH, points=POINTS, epsilon=0.7, dim_size=5)
    assert torch.equal(found.masses[[1, 3, 4]], torch.zeros(3, 4).double())
    assert torch.allclose(found.points[[1, 3, 4]], POINTS.expand(3, 4, 2))
    broken = NODES.clone()
    broken[0, 0] = torch.nan
    after = free_pool(broken, BATCH, points=POINTS, epsilon=0.7, dim_size=5)
    assert after.masses[0].isnan().all()
    assert torch.equal(after.points[1:], found.points[1:]) and torch.equal(after.masses[1:], found.masses[1:])
    alone = free_pool(NODES[6:], points=POINTS, epsilon=0.7)
    assert torch.equal(alone.points[0], found.points[2])


@pytest.mark.parametrize("free", [False, True])
def test_gradcheck_in_nodes_masses_points_and_epsilon(free):
    def received(nodes, masses, points, epsilon):
        return tuple(transport_pool(nodes, BATCH, points=points, epsilon=epsilon, masses=masses, free=free))

    inputs = (NODES, MASSES, POINTS, torch.tensor(0.7, dtype=torch.float64))
    assert gradcheck(received, [value.clone().requires_grad_() for value in inputs])


@pytest.mark.parametrize("free", [False, True])
def test_a_second_derivative_is_refused(free):
    nodes = NODES.clone().requires_grad_()
    found = transport_pool(nodes, BATCH, points=POINTS, epsilon=0.7, free=free)
    (gradient,) = torch.autograd.grad(found.points.square().sum(), nodes, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


@pytest.mark.parametrize("free", [False, True])
def test_without_kernels_torch_gives_the_same(free, monkeypatch):
    def values_and_gradients():
        inputs = [value.clone().requires_grad_() for value in (NODES, MASSES, POINTS)]
        found = transport_pool(inputs[0], BATCH, points=inputs[2], epsilon=0.7, masses=inputs[1], free=free)
        return [*found, *torch.autograd.grad(sum(value.square().sum() for value in found), inputs)]

    by_kernels = values_and_gradients()
    monkeypatch.setattr(ragged, "HAS_NUMBA", False)
    for one, other in zip(by_kernels, values_and_gradients(), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("epsilon", [5.0, 0.7, 0.05])
def test_equal_shares_against_pot(epsilon):
    found = transport_pool(NODES, BATCH, points=POINTS, epsilon=epsilon, masses=MASSES)
    assert torch.allclose(found.masses[[0, 2]], torch.full((2, 4), 0.25).double(), atol=1e-12)
    for graph in (0, 2):
        nodes, masses = NODES[graph == BATCH].numpy(), MASSES[graph == BATCH].numpy()
        plan = ot.sinkhorn(
            np.full(4, 0.25),
            masses / masses.sum(),
            ot.dist(POINTS.numpy(), nodes),
            epsilon,
            method="sinkhorn_log",
            numItermax=100_000,
            stopThr=1e-12,
        )
        means = 4 * plan @ nodes
        np.testing.assert_allclose(found.points[graph], means, atol=1e-8)
        offsets = nodes[None] - means[:, None]  # (M, N, D)
        np.testing.assert_allclose(found.variances[graph], 4 * np.einsum("mn,mnd->md", plan, offsets**2), atol=1e-8)


def test_a_small_epsilon_gives_the_optimal_assignment():
    nodes = torch.randn(6, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    points = torch.randn(6, 2, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    found = transport_pool(nodes, points=points, epsilon=1e-4)
    _, columns = linear_sum_assignment(torch.cdist(points, nodes).square().numpy())
    assert torch.allclose(found.points[0], nodes[columns], atol=1e-6)
    assert torch.allclose(found.variances, torch.zeros(1, 6, 2).double(), atol=1e-6)


def test_the_points_are_where_one_step_of_the_flow_puts_the_reference():
    found = transport_pool(NODES, BATCH, points=POINTS, epsilon=0.7)
    options = {"relative": False, "debias": False, "gradient": "none", "engine": "torch", "epsilon": 0.7}
    step = flow_pool(NODES, BATCH, reference=POINTS, step_size=1.0, max_steps=1, **options)
    assert torch.allclose(found.points[[0, 2]], step.points[[0, 2]], atol=1e-9)


@pytest.mark.parametrize("free", [False, True])
def test_mean_and_variance_of_the_graph_are_in_the_output(free):
    found = transport_pool(NODES, BATCH, points=POINTS, epsilon=0.7, masses=MASSES, free=free)
    for graph in (0, 2):
        own = graph == BATCH
        weights = (MASSES[own] / MASSES[own].sum()).unsqueeze(-1)
        shares = found.masses[graph].unsqueeze(-1)
        mean = (weights * NODES[own]).sum(0)
        assert torch.allclose((shares * found.points[graph]).sum(0), mean)
        between = (shares * (found.points[graph] - mean).square()).sum(0)
        within = (shares * found.variances[graph]).sum(0)
        assert torch.allclose(between + within, (weights * (NODES[own] - mean).square()).sum(0))


def test_equal_shares_beside_empty_broken_and_harder_graphs():
    """An empty graph says nothing, a broken one NaN, and the iterations that another one needs change no bit."""
    found = transport_pool(NODES, BATCH, points=POINTS, epsilon=0.7, dim_size=5)
    assert torch.equal(found.masses[[1, 3, 4]], torch.zeros(3, 4).double())
    assert torch.allclose(found.points[[1, 3, 4]], POINTS.expand(3, 4, 2))
    broken = NODES.clone()
    broken[0, 0] = torch.nan
    harder = torch.cat([NODES, 30 * NODES[:3]]), torch.cat([BATCH, torch.full((3,), 3)])
    for other in (
        transport_pool(broken, BATCH, points=POINTS, epsilon=0.7, dim_size=5),
        transport_pool(*harder, points=POINTS, epsilon=0.7),
    ):
        assert torch.equal(other.points[2], found.points[2]) and torch.equal(other.variances[2], found.variances[2])
    assert transport_pool(broken, BATCH, points=POINTS, epsilon=0.7).points[0].isnan().all()


def test_nodes_without_mass_do_not_count():
    masses = torch.where(torch.arange(11) % 3 == 0, 0.0, MASSES)
    found = transport_pool(NODES, BATCH, points=POINTS, epsilon=0.7, masses=masses)
    kept = masses > 0
    expected = transport_pool(NODES[kept], BATCH[kept], points=POINTS, epsilon=0.7, masses=masses[kept])
    assert torch.allclose(found.points, expected.points, atol=1e-12)


def test_gradients_are_finite_where_a_point_receives_nothing():
    points = torch.cat([POINTS, torch.tensor([[50.0, 50.0]]).double()]).requires_grad_()
    nodes = NODES.clone().requires_grad_()
    found = free_pool(nodes, BATCH, points=points, epsilon=0.1)
    (found.points.square().sum() + found.masses.square().sum()).backward()
    assert nodes.grad.isfinite().all()
    # Its row is the reference point in all three graphs, and nothing else depends on it.
    assert torch.allclose(points.grad[4], 3 * 2 * points.detach()[4])


def test_far_offsets_and_single_precision():
    there = free_pool(NODES + 1e6, BATCH, points=POINTS + 1e6, epsilon=0.7)
    here = free_pool(NODES, BATCH, points=POINTS, epsilon=0.7)
    assert torch.allclose(there.masses, here.masses, atol=1e-8)
    assert torch.allclose(there.points - 1e6, here.points, atol=1e-7)
    single = free_pool(NODES.float(), BATCH, points=POINTS.float(), epsilon=0.7)
    assert single.points.dtype == single.masses.dtype == torch.float32
    assert torch.allclose(single.points.double(), here.points, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epsilon": 0.0}, ValueError, "epsilon is 0.0; pass one finite number > 0"),
        ({"epsilon": torch.ones(2)}, ValueError, "pass one finite number > 0"),
        ({"points": POINTS.float()}, TypeError, "points is torch.float32, nodes are torch.float64"),
        ({"points": POINTS[:, :1]}, ValueError, r"expected \(num_points, 2\)"),
        ({"masses": -MASSES}, ValueError, "11 masses are negative"),
        ({"masses": MASSES.float()}, TypeError, "masses is torch.float32"),
        ({"masses": [1.0] * 11}, TypeError, "masses is a list"),
    ],
)
def test_mistakes_are_named(options, error, message):
    with pytest.raises(error, match=message):
        free_pool(NODES, BATCH, **{"points": POINTS, "epsilon": 0.7, **options})
