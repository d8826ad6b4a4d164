"""Free point masses: closed forms, limits and gradients."""

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from flowpool.relaxed import relaxed_pool

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
    found = relaxed_pool(NODES[order], BATCH[order], points=POINTS, epsilon=0.7, masses=MASSES[order])
    for graph in (0, 2):
        own = graph == BATCH
        shares, means = by_definition(NODES[own].numpy(), MASSES[own].numpy(), POINTS.numpy(), 0.7)
        np.testing.assert_allclose(found.masses[graph], shares, rtol=1e-12)
        np.testing.assert_allclose(found.points[graph], means, rtol=1e-10)
    by_offsets = relaxed_pool(NODES, ptr=torch.tensor([0, 6, 6, 11]), points=POINTS, epsilon=0.7, masses=MASSES)
    assert torch.allclose(by_offsets.points, found.points, rtol=1e-12)


def test_the_plan_minimises_the_objective_with_only_the_marginal_of_the_nodes_kept():
    """Any other plan with the same column sums costs more; the shares are its row sums."""
    nodes, points, epsilon = NODES[:6].numpy(), POINTS.numpy(), 0.7
    cost = ((points[:, None] - nodes[None]) ** 2).sum(-1)

    def objective(plan):
        return (plan * cost).sum() + epsilon * (plan * np.log(plan * 4 * 6)).sum()

    kernel = np.exp(-cost / epsilon)
    best = kernel / kernel.sum(0) / 6
    np.testing.assert_allclose(relaxed_pool(NODES[:6], points=POINTS, epsilon=epsilon).masses[0], best.sum(1))
    generator = np.random.default_rng(0)
    for _ in range(20):
        other = best * np.exp(0.1 * generator.standard_normal(best.shape))
        assert objective(other / other.sum(0) / 6) > objective(best)


def test_a_large_epsilon_gives_every_point_the_mean():
    found = relaxed_pool(NODES, BATCH, points=POINTS, epsilon=1e9, masses=MASSES)
    assert torch.allclose(found.masses[[0, 2]], torch.full((2, 4), 0.25).double(), atol=1e-8)
    for graph in (0, 2):
        own = graph == BATCH
        mean = (MASSES[own, None] * NODES[own]).sum(0) / MASSES[own].sum()
        assert torch.allclose(found.points[graph], mean.expand(4, 2), atol=1e-7)


def test_a_small_epsilon_counts_the_nodes_nearest_to_each_point():
    points = torch.cat([POINTS, torch.tensor([[50.0, 50.0]]).double()])  # nobody is near the last one
    found = relaxed_pool(NODES, BATCH, points=points, epsilon=1e-4)
    for graph in (0, 2):
        nodes = NODES[graph == BATCH].numpy()
        nearest = ((nodes[:, None] - points.numpy()) ** 2).sum(-1).argmin(1)
        counts = np.bincount(nearest, minlength=5)
        np.testing.assert_allclose(len(nodes) * found.masses[graph], counts, atol=1e-9)
        means = [nodes[nearest == i].mean(0) if counts[i] else points[i].numpy() for i in range(5)]
        np.testing.assert_allclose(found.points[graph], means, atol=1e-8)


def test_the_mean_of_the_graph_is_in_the_output():
    found = relaxed_pool(NODES, BATCH, points=POINTS, epsilon=0.7, masses=MASSES)
    mean = (found.masses.unsqueeze(-1) * found.points).sum(1)
    own = BATCH == 2
    assert torch.allclose(mean[2], (MASSES[own, None] * NODES[own]).sum(0) / MASSES[own].sum())


def test_empty_graphs_receive_nothing_and_trouble_stays_in_its_graph():
    found = relaxed_pool(NODES, BATCH, points=POINTS, epsilon=0.7, dim_size=5)
    assert torch.equal(found.masses[[1, 3, 4]], torch.zeros(3, 4).double())
    assert torch.allclose(found.points[[1, 3, 4]], POINTS.expand(3, 4, 2))
    broken = NODES.clone()
    broken[0, 0] = torch.nan
    after = relaxed_pool(broken, BATCH, points=POINTS, epsilon=0.7, dim_size=5)
    assert after.masses[0].isnan().all()
    assert torch.equal(after.points[1:], found.points[1:]) and torch.equal(after.masses[1:], found.masses[1:])
    alone = relaxed_pool(NODES[6:], points=POINTS, epsilon=0.7)
    assert torch.equal(alone.points[0], found.points[2])


def test_gradcheck_in_nodes_masses_points_and_epsilon():
    def shares_and_means(nodes, masses, points, epsilon):
        return tuple(relaxed_pool(nodes, BATCH, points=points, epsilon=epsilon, masses=masses))

    inputs = (NODES, MASSES, POINTS, torch.tensor(0.7, dtype=torch.float64))
    assert gradcheck(shares_and_means, [value.clone().requires_grad_() for value in inputs])


def test_gradients_are_finite_where_a_point_receives_nothing():
    points = torch.cat([POINTS, torch.tensor([[50.0, 50.0]]).double()]).requires_grad_()
    nodes = NODES.clone().requires_grad_()
    found = relaxed_pool(nodes, BATCH, points=points, epsilon=0.1)
    (found.points.square().sum() + found.masses.square().sum()).backward()
    assert nodes.grad.isfinite().all()
    # Its row is the reference point in all three graphs, and nothing else depends on it.
    assert torch.allclose(points.grad[4], 3 * 2 * points.detach()[4])


def test_far_offsets_and_single_precision():
    there = relaxed_pool(NODES + 1e6, BATCH, points=POINTS + 1e6, epsilon=0.7)
    here = relaxed_pool(NODES, BATCH, points=POINTS, epsilon=0.7)
    assert torch.allclose(there.masses, here.masses, atol=1e-8)
    assert torch.allclose(there.points - 1e6, here.points, atol=1e-7)
    single = relaxed_pool(NODES.float(), BATCH, points=POINTS.float(), epsilon=0.7)
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
        relaxed_pool(NODES, BATCH, **{"points": POINTS, "epsilon": 0.7, **options})
