import numpy as np
import ot
import pytest
import torch
from helpers import random_pair
from torch.autograd import gradcheck

from flowpool.core import sinkhorn
from flowpool.core.sinkhorn import DifferentiablePlan, DifferentiableSelfPlan

PAIR = random_pair()
COST = torch.cdist(PAIR.points, PAIR.nodes) ** 2
SELF_COST = torch.cdist(PAIR.points, PAIR.points) ** 2
A, B = PAIR.point_masses, PAIR.masses


def epsilon(value, batch=3):
    return torch.full((batch,), value, dtype=torch.float64)


@pytest.mark.parametrize("level", [10.0, 1.0, 0.3])
def test_newton_and_sinkhorn_and_pot_give_the_same_plan(level):
    newton = sinkhorn.solve(COST, A, B, epsilon(level))
    ascent = sinkhorn.sinkhorn(COST, A, B, epsilon(level), tolerance=1e-12, max_iterations=20_000)
    assert newton.error.max() <= 1e-12
    assert torch.allclose(newton.plan, ascent.plan, atol=1e-11)
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
    dual = solved.dual_potential(COST, B, epsilon(level))
    scaled = ((solved.potential[..., None] + dual[:, None] - COST) / level).exp()
    assert torch.allclose(scaled, solved.plan, atol=1e-12)


def test_value_is_the_primal_objective():
    level = 0.3
    solved = sinkhorn.solve(COST, A, B, epsilon(level))
    primal = (solved.plan * COST).sum((-1, -2)) + level * (solved.plan * solved.plan.log()).sum((-1, -2))
    assert torch.allclose(solved.value(COST, A, B, epsilon(level)), primal, atol=1e-10)


def test_each_problem_stops_on_its_own_and_a_warm_start_saves_iterations():
    levels = torch.tensor([5.0, 0.5, 0.02], dtype=torch.float64)
    together = sinkhorn.sinkhorn(COST, A, B, levels, tolerance=1e-9, max_iterations=100_000)
    assert together.iterations[0] < together.iterations[1] < together.iterations[2]
    for graph in range(3):
        one = slice(graph, graph + 1)
        alone = sinkhorn.sinkhorn(COST[one], A[one], B[one], levels[one], tolerance=1e-9, max_iterations=100_000)
        assert alone.iterations[0] == together.iterations[graph]
    cold = sinkhorn.solve(COST, A, B, levels)
    warm = sinkhorn.solve(COST * 1.001, A, B, levels, cold.potential)
    assert (warm.iterations < cold.iterations).all()


def test_unfinished_problems_say_how_far_they_are():
    stopped = sinkhorn.sinkhorn(COST, A, B, epsilon(0.01), max_iterations=3)
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
def test_self_transport_by_newton_by_averaged_sinkhorn_and_as_a_general_problem(level):
    solved = sinkhorn.solve_self(SELF_COST, A, epsilon(level))
    ascent = sinkhorn.sinkhorn_self(SELF_COST, A, epsilon(level), tolerance=1e-13)
    general = sinkhorn.solve(SELF_COST, A, A, epsilon(level))
    assert solved.error.max() <= 1e-12
    assert torch.allclose(solved.plan, ascent.plan, atol=1e-11)
    assert torch.allclose(solved.plan, general.plan, atol=1e-9)
    assert torch.equal(solved.plan, solved.plan.transpose(-1, -2))
    value = (solved.plan * SELF_COST).sum((-1, -2)) + level * torch.special.xlogy(solved.plan, solved.plan).sum(
        (-1, -2)
    )
    assert torch.allclose(solved.value(A), value, atol=1e-10)


def test_two_diracs_against_one_in_closed_form():
    """One node: the plan is a, whatever the cost; two points at equal distance from two nodes: the plan is a b^T."""
    one = sinkhorn.solve(COST[..., :1], A, torch.ones(3, 1, dtype=A.dtype), epsilon(0.1))
    assert torch.allclose(one.plan.squeeze(-1), A)
    flat = sinkhorn.solve(torch.ones_like(COST), A, B, epsilon(0.1))
    assert torch.allclose(flat.plan, A[..., None] * B[:, None])


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


def test_self_plan_is_differentiable():
    def plan(points, a, level):
        cost, a = (points[:, :, None] - points[:, None]).square().sum(-1), normalised(a)
        with torch.no_grad():
            solved = sinkhorn.solve_self(cost, a, level)
        return DifferentiableSelfPlan.apply(cost, a, level, solved)

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
