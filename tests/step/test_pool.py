"""What a reference receives, with equal and with free masses: closed forms, POT, limits and gradients."""

import numpy as np
import ot
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch.autograd import gradcheck

from flowpool import Received, costs, flow_pool
from flowpool import transport_pool as relative_pool


def transport_pool(*arguments, **options):
    """In absolute units, in which most closed forms are shorter."""
    return relative_pool(*arguments, **({"relative": False} | options))


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
    found = free_pool(NODES[order], BATCH[order], reference=POINTS, epsilon=0.7, masses=MASSES[order])
    for graph in (0, 2):
        own = graph == BATCH
        shares, means = by_definition(NODES[own].numpy(), MASSES[own].numpy(), POINTS.numpy(), 0.7)
        np.testing.assert_allclose(found.masses[graph], shares, rtol=1e-12)
        np.testing.assert_allclose(found.points[graph], means, rtol=1e-10)
    by_offsets = free_pool(NODES, ptr=torch.tensor([0, 6, 6, 11]), reference=POINTS, epsilon=0.7, masses=MASSES)
    assert torch.allclose(by_offsets.points, found.points, rtol=1e-12)


def test_the_plan_minimises_the_objective_with_only_the_marginal_of_the_nodes_kept():
    """Any other plan with the same column sums costs more; the shares are its row sums."""
    nodes, points, epsilon = NODES[:6].numpy(), POINTS.numpy(), 0.7
    cost = ((points[:, None] - nodes[None]) ** 2).sum(-1)

    def objective(plan):
        return (plan * cost).sum() + epsilon * (plan * np.log(plan * 4 * 6)).sum()

    kernel = np.exp(-cost / epsilon)
    best = kernel / kernel.sum(0) / 6
    np.testing.assert_allclose(free_pool(NODES[:6], reference=POINTS, epsilon=epsilon).masses[0], best.sum(1))
    generator = np.random.default_rng(0)
    for _ in range(20):
        other = best * np.exp(0.1 * generator.standard_normal(best.shape))
        assert objective(other / other.sum(0) / 6) > objective(best)


def test_a_large_epsilon_gives_every_point_the_mean():
    found = free_pool(NODES, BATCH, reference=POINTS, epsilon=1e9, masses=MASSES)
    assert torch.allclose(found.masses[[0, 2]], torch.full((2, 4), 0.25).double(), atol=1e-8)
    for graph in (0, 2):
        own = graph == BATCH
        mean = (MASSES[own, None] * NODES[own]).sum(0) / MASSES[own].sum()
        assert torch.allclose(found.points[graph], mean.expand(4, 2), atol=1e-7)


def test_a_small_epsilon_counts_the_nodes_nearest_to_each_point():
    points = torch.cat([POINTS, torch.tensor([[50.0, 50.0]]).double()])  # nobody is near the last one
    found = free_pool(NODES, BATCH, reference=points, epsilon=1e-4)
    for graph in (0, 2):
        nodes = NODES[graph == BATCH].numpy()
        nearest = ((nodes[:, None] - points.numpy()) ** 2).sum(-1).argmin(1)
        counts = np.bincount(nearest, minlength=5)
        np.testing.assert_allclose(len(nodes) * found.masses[graph], counts, atol=1e-9)
        means = [nodes[nearest == i].mean(0) if counts[i] else points[i].numpy() for i in range(5)]
        np.testing.assert_allclose(found.points[graph], means, atol=1e-8)


def test_the_mean_of_the_graph_is_in_the_output():
    found = free_pool(NODES, BATCH, reference=POINTS, epsilon=0.7, masses=MASSES)
    mean = (found.masses.unsqueeze(-1) * found.points).sum(1)
    own = BATCH == 2
    assert torch.allclose(mean[2], (MASSES[own, None] * NODES[own]).sum(0) / MASSES[own].sum())


def test_empty_graphs_receive_nothing_and_trouble_stays_in_its_graph():
    found = free_pool(NODES, BATCH, reference=POINTS, epsilon=0.7, dim_size=5)
    assert torch.equal(found.masses[[1, 3, 4]], torch.zeros(3, 4).double())
    assert torch.allclose(found.points[[1, 3, 4]], POINTS.expand(3, 4, 2))
    broken = NODES.clone()
    broken[0, 0] = torch.nan
    after = free_pool(broken, BATCH, reference=POINTS, epsilon=0.7, dim_size=5)
    assert after.masses[0].isnan().all()
    assert torch.equal(after.points[1:], found.points[1:]) and torch.equal(after.masses[1:], found.masses[1:])
    alone = free_pool(NODES[6:], reference=POINTS, epsilon=0.7)
    assert torch.equal(alone.points[0], found.points[2])


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("free", [False, True])
def test_gradcheck_in_everything(free, relative):
    cost = costs.Mahalanobis(2).double()
    torch.nn.init.normal_(cost.weight, std=0.3, generator=torch.Generator().manual_seed(2))
    shares = torch.tensor([0.4, 0.1, 0.3, 0.2], dtype=torch.float64)

    def received(nodes, masses, reference, point_masses, epsilon, _):
        given = {"reference": reference, "epsilon": epsilon, "masses": masses, "point_masses": point_masses}
        found = transport_pool(nodes, BATCH, **given, cost=cost, free=free, relative=relative)
        return (*found[:3], found.deviations)

    inputs = (NODES, MASSES, POINTS, shares, torch.tensor([0.7, 0.2, 0.4], dtype=torch.float64))
    assert gradcheck(received, [*(value.clone().requires_grad_() for value in inputs), cost.weight])


@pytest.mark.parametrize("free", [False, True])
def test_a_second_derivative_is_refused(free):
    nodes = NODES.clone().requires_grad_()
    found = transport_pool(nodes, BATCH, reference=POINTS, epsilon=0.7, free=free)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        # Linear in the points: a check of what flows back would find nothing there to differentiate.
        torch.autograd.grad(found.points[:, 0].sum(), nodes, create_graph=True)


@pytest.mark.parametrize("free", [False, True])
def test_both_engines_give_the_same(free):
    def values_and_gradients(engine):
        inputs = [value.clone().requires_grad_() for value in (NODES, MASSES, POINTS)]
        given = {"reference": inputs[2], "epsilon": 0.7, "masses": inputs[1], "free": free}
        found = transport_pool(inputs[0], BATCH, **given, engine=engine)[:3]
        return [*found, *torch.autograd.grad(sum(value.square().sum() for value in found), inputs)]

    for one, other in zip(values_and_gradients("compiled"), values_and_gradients("torch"), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-9)  # shares are solved to 1e-10


@pytest.mark.parametrize("epsilon", [5.0, 0.7, 0.05])
def test_equal_shares_against_pot(epsilon):
    found = transport_pool(NODES, BATCH, reference=POINTS, epsilon=epsilon, masses=MASSES)
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
    found = transport_pool(nodes, reference=points, epsilon=1e-4)
    _, columns = linear_sum_assignment(torch.cdist(points, nodes).square().numpy())
    assert torch.allclose(found.points[0], nodes[columns], atol=1e-6)
    assert torch.allclose(found.variances, torch.zeros(1, 6, 2).double(), atol=1e-6)


@pytest.mark.parametrize("cost", ["sqeuclidean", "mahalanobis"])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("epsilon", [0.7, torch.tensor([0.7, 0.1, 0.2])])
def test_the_points_are_where_one_step_of_the_flow_puts_the_reference(relative, epsilon, cost):
    """The same reference and epsilon, whatever they are relative to, shared or graph by graph; any point masses."""
    if cost == "mahalanobis":
        cost = costs.Mahalanobis(2)
        torch.nn.init.normal_(cost.weight, std=0.5, generator=torch.Generator().manual_seed(2))
    shares = torch.tensor([0.4, 0.1, 0.3, 0.2], dtype=torch.float64)
    given = {"reference": POINTS, "epsilon": epsilon, "relative": relative, "cost": cost, "point_masses": shares}
    found = transport_pool(NODES, BATCH, **given)
    options = {"debias": False, "gradient": "none", "engine": "torch", "step_size": 1.0, "max_steps": 1}
    step = flow_pool(NODES, BATCH, **given, **options)
    assert torch.allclose(found.points[[0, 2]], step.points[[0, 2]], atol=1e-9)
    assert torch.allclose(found.masses[[0, 2]], shares.expand(2, 4), atol=1e-12)


def test_relative_units_move_and_scale_with_the_nodes():
    here = relative_pool(NODES, BATCH, reference=POINTS)
    there = relative_pool(1e4 - 50 * NODES, BATCH, reference=-POINTS)
    assert torch.allclose(there.masses, here.masses, atol=1e-9)
    assert torch.allclose(there.points[[0, 2]], 1e4 - 50 * here.points[[0, 2]], atol=1e-7)
    assert torch.allclose(there.deviations, 50 * here.deviations, atol=1e-7)
    one = relative_pool(NODES[:1].expand(3, 2), reference=POINTS)
    assert torch.allclose(one.points[0], NODES[0].expand(4, 2)) and not one.variances.any()


def test_free_point_masses_are_how_readily_points_receive():
    shares = torch.tensor([0.4, 0.1, 0.3, 0.2], dtype=torch.float64)
    found = free_pool(NODES[:6], reference=POINTS, epsilon=0.7, point_masses=5 * shares)
    cost = (POINTS[:, None] - NODES[None, :6]).square().sum(-1)
    plan = (shares.log()[:, None] - cost / 0.7).softmax(0) / 6
    assert torch.allclose(found.masses[0], plan.sum(1))


def test_deviations_are_roots_with_gradients_bounded_down_to_zero():
    """Points that receive ever narrower pairs of nodes: what moves a node by one moves a deviation by at most one."""
    centres = torch.tensor([[0.0, 0.0], [9.0, 0.0]], dtype=torch.float64)
    for width in (1.0, 1e-3, 1e-6, 1e-9, 1e-12, 0.0):
        nodes = torch.cat([centres - width, centres + width]).requires_grad_()
        found = transport_pool(nodes, reference=centres, epsilon=0.1)
        assert torch.allclose(found.deviations, torch.full((1, 2, 2), width).double(), rtol=1e-6, atol=5e-7)
        assert torch.equal(found.deviations.square() > 0, found.variances > 0)
        found.deviations.sum().backward()
        assert float(nodes.grad.abs().max()) <= 0.5 * (1 + 1e-6)  # the root of the share of a node of a pair, squared
    assert float(nodes.grad.abs().max()) == 0
    nothing = torch.zeros(1, 1, 1)
    assert Received(nothing[0], nothing, nothing, nothing[0, 0], nothing[0, 0]).deviations.tolist() == [[[0.0]]]


@pytest.mark.parametrize("free", [False, True])
def test_mean_and_variance_of_the_graph_are_in_the_output(free):
    found = transport_pool(NODES, BATCH, reference=POINTS, epsilon=0.7, masses=MASSES, free=free)
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
    found = transport_pool(NODES, BATCH, reference=POINTS, epsilon=0.7, dim_size=5)
    assert torch.equal(found.masses[[1, 3, 4]], torch.zeros(3, 4).double())
    assert torch.allclose(found.points[[1, 3, 4]], POINTS.expand(3, 4, 2))
    broken = NODES.clone()
    broken[0, 0] = torch.nan
    harder = torch.cat([NODES, 30 * NODES[:3]]), torch.cat([BATCH, torch.full((3,), 3)])
    for other in (
        transport_pool(broken, BATCH, reference=POINTS, epsilon=0.7, dim_size=5),
        transport_pool(*harder, reference=POINTS, epsilon=0.7),
    ):
        assert torch.equal(other.points[2], found.points[2]) and torch.equal(other.variances[2], found.variances[2])
    assert transport_pool(broken, BATCH, reference=POINTS, epsilon=0.7).points[0].isnan().all()


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_broken_graph_changes_no_bit_of_a_shared_gradient(value, free, relative):
    def gradients(nodes, batch, dim_size):
        shared = [POINTS.clone(), torch.full((4,), 0.25).double(), torch.tensor(0.7).double()]
        reference, point_masses, epsilon = (leaf.requires_grad_() for leaf in shared)
        given = {"reference": reference, "point_masses": point_masses, "epsilon": epsilon, "dim_size": dim_size}
        found = transport_pool(nodes, batch, **given, free=free, relative=relative)
        rows = torch.cat([found.points.flatten(1), found.deviations.flatten(1), found.masses], 1)[[0, -1]]
        rows.square().sum().backward()
        return [rows, *(leaf.grad for leaf in shared)]

    broken = torch.cat([NODES, torch.full((3, 2), value).double()])
    found = gradients(broken, torch.cat([BATCH, torch.ones(3).long()]), 3)
    for one, other in zip(found, gradients(NODES, BATCH.clamp(max=1), 2), strict=True):
        assert torch.equal(one, other)


def test_nodes_without_mass_do_not_count():
    masses = torch.where(torch.arange(11) % 3 == 0, 0.0, MASSES)
    found = transport_pool(NODES, BATCH, reference=POINTS, epsilon=0.7, masses=masses)
    kept = masses > 0
    expected = transport_pool(NODES[kept], BATCH[kept], reference=POINTS, epsilon=0.7, masses=masses[kept])
    assert torch.allclose(found.points, expected.points, atol=1e-12)


def test_gradients_are_finite_where_a_point_receives_nothing():
    points = torch.cat([POINTS, torch.tensor([[50.0, 50.0]]).double()]).requires_grad_()
    nodes = NODES.clone().requires_grad_()
    found = free_pool(nodes, BATCH, reference=points, epsilon=0.1)
    (found.points.square().sum() + found.masses.square().sum()).backward()
    assert nodes.grad.isfinite().all()
    # Its row is the reference point in all three graphs, and nothing else depends on it.
    assert torch.allclose(points.grad[4], 3 * 2 * points.detach()[4])


def test_far_offsets_and_single_precision():
    there = free_pool(NODES + 1e6, BATCH, reference=POINTS + 1e6, epsilon=0.7)
    here = free_pool(NODES, BATCH, reference=POINTS, epsilon=0.7)
    assert torch.allclose(there.masses, here.masses, atol=1e-8)
    assert torch.allclose(there.points - 1e6, here.points, atol=1e-7)
    single = free_pool(NODES.float(), BATCH, reference=POINTS.float(), epsilon=0.7)
    assert single.points.dtype == single.masses.dtype == torch.float32
    assert torch.allclose(single.points.double(), here.points, atol=1e-5)


def test_the_reference_takes_the_dtype_of_the_nodes():
    given = {"reference": POINTS.float(), "epsilon": 0.7}
    found = transport_pool(NODES, BATCH, **given)
    assert found.points.dtype == torch.float64
    exact = transport_pool(NODES, BATCH, reference=POINTS.float().double(), epsilon=0.7)
    assert torch.equal(found.points, exact.points)


def test_autocast_and_masses_of_another_precision():
    nodes, reference = NODES.float(), POINTS.float()
    narrow = nodes.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = transport_pool(narrow, BATCH, reference=reference, masses=MASSES.float())
    expected = transport_pool(narrow, BATCH, reference=reference, masses=MASSES.float().bfloat16())
    assert found.points.dtype == torch.bfloat16
    assert torch.allclose(found.points.float(), expected.points.float(), atol=0.02)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epsilon": 0.0}, ValueError, "epsilon is 0.0; it must be finite and > 0"),
        ({"epsilon": "0.1"}, TypeError, "epsilon is '0.1'; pass a number"),
        (
            {"epsilon": torch.ones(2)},
            ValueError,
            r"epsilon has shape \(2,\); pass one number, or one per graph, \(3,\)",
        ),
        ({"epsilon": torch.tensor([1.0, -2.0, 1.0])}, ValueError, "epsilon is -2.0; it must be finite and > 0"),
        ({"reference": POINTS[:, :1]}, ValueError, r"expected \(num_points, 2\)"),
        ({"reference": POINTS.long()}, TypeError, "reference is torch.int64; pass reference.float"),
        ({"masses": -MASSES}, ValueError, "11 masses are negative"),
        ({"masses": MASSES.float()}, TypeError, "masses is torch.float32, nodes is torch.float64"),
        ({"masses": [1.0] * 11}, TypeError, "masses is a list"),
        ({"point_masses": torch.ones(3)}, ValueError, r"expected a tensor of shape \(4,\), one mass per point"),
        ({"point_masses": torch.tensor([1.0, 0.0, 1.0, 1.0])}, ValueError, "first: point 1, 0"),
        ({"cost": "cosine"}, ValueError, r"the diagonal Mahalanobis cost, not Cosine\(\); use flow_pool"),
        ({"cost": costs.Mahalanobis(2, rank=1)}, ValueError, "the diagonal Mahalanobis cost, not"),
        ({"relative": 1}, TypeError, "relative is 1; pass True or False"),
        ({"engine": "cuda"}, ValueError, "Unknown engine 'cuda'; pass 'auto', 'compiled' or 'torch'"),
    ],
)
def test_mistakes_are_named(options, error, message):
    with pytest.raises(error, match=message):
        free_pool(NODES, BATCH, **{"reference": POINTS, "epsilon": 0.7, **options})


@pytest.mark.parametrize("engine", ["compiled", "torch"])
def test_a_reference_far_away_gets_its_shares(engine):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        nodes = torch.randn(45, 3, generator=generator).double() + 1e3 * torch.randn(3, generator=generator).double()
        for count in (2, 3):
            reference = 1e3 * torch.randn(count, 3, generator=generator).double()
            found = transport_pool(nodes, reference=reference, epsilon=0.06, relative=False, engine=engine)
            assert torch.allclose(found.masses, torch.full_like(found.masses, 1 / count), rtol=1e-6)
