"""Unrolled derivatives: their recursion against autograd, their decay against theory, their limit, their memory."""

import pytest
import torch

from flowpool.core.divergence import make_energy
from flowpool.core.flow import descend
from flowpool.core.implicit import implicit
from flowpool.lab.paper import vanishing


def test_recursion_is_what_autograd_gives() -> None:
    start, nodes = vanishing.clouds(seed=1)
    steps = 6
    decay = vanishing.follow_jacobians(start, nodes, 0.5, True, steps)
    leaf = nodes.clone().requires_grad_()
    length = 2 * vanishing.TAU / vanishing.NUM_POINTS
    points, _ = descend(make_energy(start[None], leaf[None], 0.5), start[None], length, steps, tolerance=0.0)
    rows = [torch.autograd.grad(entry, leaf, retain_graph=True)[0].flatten() for entry in points.flatten()]
    assert float(decay.total[-1]) == pytest.approx(float(torch.stack(rows).norm()), rel=1e-8)


def test_first_share_decays_as_the_paper_says_at_large_epsilon() -> None:
    start, nodes = vanishing.clouds(seed=2)
    decay = vanishing.follow_jacobians(start, nodes, 1e4, False, 40)
    expected = float(decay.first_part[0]) * vanishing.theory() ** torch.arange(40, dtype=torch.float64)
    torch.testing.assert_close(decay.first_part, expected, rtol=1e-3, atol=0)


def test_whole_jacobian_tends_to_the_implicit_one() -> None:
    start, nodes = vanishing.clouds(seed=3)
    decay = vanishing.follow_jacobians(start, nodes, 5.0, False, 150)
    assert float(decay.first_part[-1]) < 1e-6 * float(decay.first_part[0])
    assert float(decay.error[-1]) < 1e-6 * decay.implicit
    assert decay.factor == pytest.approx(decay.slowest, abs=5e-3)


def test_implicit_norm_is_that_of_the_library() -> None:
    start, nodes = vanishing.clouds(seed=3)
    decay = vanishing.follow_jacobians(start, nodes, 5.0, False, 400)
    energy = make_energy(start[None], nodes[None], 5.0, debias=False)
    with torch.no_grad():
        end, _ = descend(energy, start[None], 2 * vanishing.TAU / vanishing.NUM_POINTS, 400, tolerance=1e-13)
    leaf = nodes[None].clone().requires_grad_()
    energy = make_energy(start[None], leaf, 5.0, debias=False)
    solved = energy.evaluate(end, tolerance=1e-14)
    basis = torch.eye(start.numel(), dtype=start.dtype).view(-1, 1, *start.shape)
    numbers = [implicit(energy, solved, vector, torch.zeros_like(energy.epsilon))[0] for vector in basis]
    rows = [torch.autograd.grad(number, leaf)[0] for number in numbers]
    assert float(torch.stack(rows).norm()) == pytest.approx(decay.implicit, rel=1e-6)


def test_memory_grows_with_the_steps_only_when_unrolled() -> None:
    unrolled = [vanishing.peak_memory("unrolled", steps, num_nodes=40) for steps in (5, 10, 20)]
    implicit = [vanishing.peak_memory("implicit", steps, num_nodes=40) for steps in (5, 20)]
    growth = [later - earlier for earlier, later in zip(unrolled, unrolled[1:], strict=False)]
    assert growth[1] == pytest.approx(2 * growth[0], rel=0.15)
    assert implicit[1] == pytest.approx(implicit[0], rel=0.05)
    assert unrolled[-1] > 2 * implicit[-1]
