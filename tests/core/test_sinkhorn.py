import numpy as np
import ot
import pytest
import torch
from helpers import random_pair
from torch.autograd import gradcheck

from flowpool.core import sinkhorn
from flowpool.core.sinkhorn import DifferentiablePlan

PAIR = random_pair()
COST = torch.cdist(PAIR.points, PAIR.nodes) ** 2
SELF_COST = torch.cdist(PAIR.points, PAIR.points) ** 2
A, B = PAIR.point_masses, PAIR.masses


def epsilon(value, batch=3):
    return torch.full((batch,), value, dtype=torch.float64)


def alternated(cost, a, b, level, iterations=20_000):
    """The plan by the alternation of the paper (eq. 6): each update makes one marginal exact."""
    scaled, f = cost / level, torch.zeros_like(a)
    for _ in range(iterations):
        g = b.log() - (f.unsqueeze(-1) - scaled).logsumexp(-2)
        following = a.log() - (g.unsqueeze(-2) - scaled).logsumexp(-1)
        if float((following - f).abs().max()) < 1e-14:
            break
        f = following
    return (f.unsqueeze(-1) + g.unsqueeze(-2) - scaled).exp()


@pytest.mark.parametrize("level", [10.0, 1.0, 0.3])
def test_newton_and_sinkhorn_and_pot_give_the_same_plan(level):
    newton = sinkhorn.solve(COST, A, B, epsilon(level))
    assert newton.error.max() <= 1e-12
    assert torch.allclose(newton.plan, alternated(COST, A, B, level), atol=1e-11)
    for graph in range(3):
        plan = ot.bregman.sinkhorn_log(
            A[graph].numpy(), B[graph].numpy(), COST[graph].numpy(), level, numItermax=20_000, stopThr=1e-13
        )
        assert np.allclose(plan, newton.plan[graph].numpy(), atol=1e-10)


def test_scaling_form_equals_potentials_form():
    """P = diag(u) K diag(v) with u = exp(f / eps), v = exp(g / eps), and u, v from the iteration on the kernel."""
    level = 0.5
    kernel = (-COST / level).exp()
    u, v = torch.ones_like(A), torch.ones_like(B)
    for _ in range(5000):
        u = A / (kernel @ v.unsqueeze(-1)).squeeze(-1)
        v = B / (kernel.transpose(-1, -2) @ u.unsqueeze(-1)).squeeze(-1)
    solved = sinkhorn.solve(COST, A, B, epsilon(level))
    assert torch.allclose(u.unsqueeze(-1) * kernel * v.unsqueeze(-2), solved.plan, atol=1e-12)
    potential, dual = sinkhorn.potentials(COST, B, epsilon(level), solved)
    scaled = ((potential[..., None] + dual[:, None] - COST) / level).exp()
    assert torch.allclose(scaled, solved.plan, atol=1e-12)


def test_value_is_the_primal_objective():
    level = 0.3
    solved = sinkhorn.solve(COST, A, B, epsilon(level))
    primal = (solved.plan * COST).sum((-1, -2)) + level * (solved.plan * solved.plan.log()).sum((-1, -2))
    assert torch.allclose(sinkhorn.value(COST, A, B, epsilon(level), solved), primal, atol=1e-10)


def test_a_warm_start_gives_the_same_plan_and_the_other_half_of_the_alternation_a_better_one():
    levels = torch.tensor([5.0, 0.5, 0.02], dtype=torch.float64)
    cold = sinkhorn.solve(COST, A, B, levels)
    moved = (PAIR.points + 0.1).unsqueeze(2) - PAIR.nodes.unsqueeze(1)
    moved = moved.square().sum(-1)
    warm = sinkhorn.solve(moved, A, B, levels, cold.potential)
    assert torch.allclose(warm.plan, sinkhorn.solve(moved, A, B, levels).plan, atol=1e-11)
    before, after = COST / levels[:, None, None], moved / levels[:, None, None]
    carried = sinkhorn.opposite(sinkhorn.soft_minimum(cold.potential, before), after, A, B)
    plain, better = (sinkhorn.newton(after, A, B, start, 0).error for start in (cold.potential, carried))
    assert (better < 0.8 * plain).all(), (better, plain)


@pytest.mark.parametrize("level", [1e-1, 1e-3, 1e-6])
def test_newton_climbs_from_anywhere(level):
    """Started from nothing at the smallest epsilon, without stages: every few iterations the objective is higher."""
    scaled = COST / level

    def objective(potential):
        return (A * potential).sum(-1) + (B * sinkhorn.soft_minimum(potential, scaled)).sum(-1)

    potential, values = torch.zeros_like(A), []
    for _ in range(20):
        values.append(objective(potential))
        potential = sinkhorn.newton(scaled, A, B, potential).potential
    assert (torch.stack(values).diff(dim=0) >= -1e-9 * scaled.amax()).all()


def test_unfinished_problems_say_how_far_they_are():
    stopped = sinkhorn.newton(COST / 0.01, A, B, torch.zeros_like(A), 1)
    assert (stopped.error > 1e-6).all()
    assert torch.allclose(stopped.error, (stopped.plan.sum(-1) - A).abs().sum(-1))


def test_a_node_without_mass_is_a_node_that_is_absent():
    masses = torch.cat([B, torch.zeros(3, 1, dtype=B.dtype)], 1)
    cost = torch.cat([COST, torch.full((3, 4, 1), 7.0, dtype=COST.dtype)], -1)
    full, less = sinkhorn.solve(cost, A, masses, epsilon(0.2)), sinkhorn.solve(COST, A, B, epsilon(0.2))
    assert torch.allclose(full.plan[..., :-1], less.plan, atol=1e-12)
    assert (full.plan[..., -1] == 0).all()
    assert full.conditional.isfinite().all()


@pytest.mark.parametrize("level", [10.0, 1.0, 0.1, 0.01])
def test_the_transport_of_a_cloud_to_itself_is_symmetric(level):
    solved = sinkhorn.solve(SELF_COST, A, A, epsilon(level))
    assert solved.error.max() <= 1e-12
    assert torch.allclose(solved.plan, averaged(SELF_COST, A, level), atol=1e-11)
    assert torch.allclose(solved.plan, solved.plan.mT, atol=1e-12)
    primal = (solved.plan * SELF_COST).sum((-1, -2)) + level * torch.special.xlogy(solved.plan, solved.plan).sum(
        (-1, -2)
    )
    assert torch.allclose(sinkhorn.value(SELF_COST, A, A, epsilon(level), solved), primal, atol=1e-10)


def test_a_point_without_mass_is_absent_from_the_transport_to_itself():
    masses = torch.cat([A, torch.zeros(3, 1, dtype=A.dtype)], 1)
    cost = torch.nn.functional.pad(SELF_COST, (0, 1, 0, 1), value=2.0)
    wide, plain = sinkhorn.solve(cost, masses, masses, epsilon(0.3)), sinkhorn.solve(SELF_COST, A, A, epsilon(0.3))
    assert torch.allclose(wide.plan[:, :-1, :-1], plain.plan, atol=1e-12) and (wide.plan[:, -1] == 0).all()
    values = [sinkhorn.value(*given, epsilon(0.3), found) for given, found in
              (((cost, masses, masses), wide), ((SELF_COST, A, A), plain))]  # fmt: skip
    assert torch.allclose(*values, atol=1e-12)


def test_two_diracs_against_one_in_closed_form():
    """One node: the plan is a, whatever the cost; two points at equal distance from two nodes: the plan is a b^T."""
    one = sinkhorn.solve(COST[..., :1], A, torch.ones(3, 1, dtype=A.dtype), epsilon(0.1))
    assert torch.allclose(one.plan.squeeze(-1), A)
    flat = sinkhorn.solve(torch.ones_like(COST), A, B, epsilon(0.1))
    assert torch.allclose(flat.plan, A[..., None] * B[:, None])


def averaged(cost, a, level):
    """The plan of a cloud with itself: each potential is averaged with what the alternation makes of it."""
    scaled, h = cost / level, a.log() / 2
    for _ in range(2000):
        h = (h + a.log() - (h.unsqueeze(-1) - scaled).logsumexp(-2)) / 2
    return (h.unsqueeze(-1) + h.unsqueeze(-2) - scaled).exp()


def normalised(masses):
    return masses / masses.sum(-1, keepdim=True)


def test_plan_is_differentiable_in_cost_masses_and_epsilon():
    def plan(cost, a, b, level):
        a, b = normalised(a), normalised(b)
        with torch.no_grad():
            solved = sinkhorn.solve(cost, a, b, level)
        return DifferentiablePlan.apply(cost, a, b, level, solved)

    inputs = [x[:1].clone().requires_grad_() for x in (COST, A, B, epsilon(0.4))]
    assert gradcheck(plan, inputs)


def test_the_plan_of_a_cloud_with_itself_is_differentiable():
    def plan(points, a, level):
        cost, a = (points[:, :, None] - points[:, None]).square().sum(-1), normalised(a)
        with torch.no_grad():
            solved = sinkhorn.solve(cost, a, a, level)
        return DifferentiablePlan.apply(cost, a, a, level, solved)

    assert gradcheck(plan, [x[:1].clone().requires_grad_() for x in (PAIR.points, A, epsilon(0.4))])


def test_exact_transport_and_wasserstein_distance():
    generator = torch.Generator().manual_seed(3)
    line, other = (torch.randn(6, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    gap = (line.sort(0).values - other.sort(0).values).abs()
    assert torch.allclose(sinkhorn.wasserstein(line, other, power=1), gap.mean())
    assert torch.allclose(sinkhorn.wasserstein(line, other), gap.square().mean().sqrt())
    plan, value = sinkhorn.exact_transport(COST[0], A[0], B[0])
    assert torch.allclose(plan.sum(0), B[0]) and torch.allclose(plan.sum(1), A[0])
    entropic = sinkhorn.solve(COST[:1], A[:1], B[:1], epsilon(0.002, 1)).plan[0]
    assert value - 1e-12 <= (entropic * COST[0]).sum() <= value + 0.01


def test_the_wasserstein_distance_feels_neither_an_offset_nor_a_unit():
    """With more than 25 points PyTorch would take differences of squares, and POT takes tiny costs for nothing."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (3, 40))
    expected = float(sinkhorn.wasserstein(x, y))
    assert float(sinkhorn.wasserstein(x + 1e8, y + 1e8)) == pytest.approx(expected, rel=1e-7)
    assert float(sinkhorn.wasserstein((x + 1e3).float(), (y + 1e3).float())) == pytest.approx(expected, rel=1e-4)
    for unit in (1e-9, 1e9):
        assert float(sinkhorn.wasserstein(unit * x, unit * y)) == pytest.approx(unit * expected, rel=1e-9)
    assert float(sinkhorn.wasserstein(x[:1], x[:1])) == 0.0
