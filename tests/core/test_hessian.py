from dataclasses import replace

import pytest
import torch
from helpers import random_pair, simplex

from flowpool import costs
from flowpool.core import flow, hessian
from flowpool.core.divergence import make_energy
from flowpool.core.hessian import Hessian
from flowpool.core.systems import Effort, conjugate_gradients

COSTS = ["sqeuclidean", "cosine", costs.Euclidean(1.5), lambda x, y: (x - y).abs().pow(3).sum(-1)]
IDS = ["sqeuclidean", "cosine", "power", "callable"]


def some_energy(cost="sqeuclidean", debias=True, **size):
    pair = random_pair(batch=2, **size)
    energy = make_energy(pair.points, pair.nodes, 0.4, pair.point_masses, pair.masses, cost, debias)
    return energy, energy.evaluate(pair.points)


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("cost", COSTS, ids=IDS)
def test_hessian_is_the_derivative_of_the_gradient(cost, debias):
    energy, here = some_energy(cost, debias)
    direction = torch.randn(here.points.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = hessian.hessian(energy, here)
    step = 1e-5
    ahead, behind = (energy.evaluate(here.points + s * direction).gradient for s in (step, -step))
    expected = (ahead - behind) / (2 * step)
    by_matrix = (found.matrix @ direction.flatten(1).unsqueeze(-1)).view_as(direction)
    assert torch.allclose(by_matrix, expected, rtol=1e-6, atol=1e-7)
    assert torch.allclose(found.product(direction), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("debias", [True, False])
def test_closed_form_equals_autograd(debias):
    energy, here = some_energy(debias=debias)
    points = here.points.clone().requires_grad_()
    by_autograd = hessian.dense_by_autograd(energy.gradient(points, here), points)
    assert torch.allclose(hessian.squared_euclidean_hessian(energy, here), by_autograd, atol=1e-10)


def test_conjugate_gradients_replace_the_matrix_where_it_is_too_large(monkeypatch):
    energy, here = some_energy()
    dense = hessian.hessian(energy, here)
    monkeypatch.setattr(hessian, "DIRECT_LIMIT", 3)
    large = hessian.hessian(energy, here)
    assert large.matrix is None
    shift = 3 * dense.unit
    one, other = (x.shifted(shift).solve(here.gradient) for x in (dense, large))
    assert torch.allclose(one.solution, other.solution, atol=1e-9)
    assert one.definite.all() and other.definite.all() and other.settled.all()
    direction = torch.randn(here.points.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.allclose(dense.product(direction), large.product(direction), atol=1e-10)


def diagonal_hessian(*values):
    """A Hessian of one point with given eigenvalues, and a rotation to make it less trivial."""
    size = len(values)
    rotation = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(0)).double())[0]
    matrix = (rotation @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ rotation.T).unsqueeze(0)
    product = hessian._matrix_product(matrix)
    unit = torch.ones(1, 1, dtype=torch.float64)
    return Hessian(matrix, product, unit, torch.diag_embed(unit)), rotation


def test_newton_step_is_exact_minimum_norm_or_refused():
    right = torch.tensor([[[1.0, -2.0, 0.5]]], dtype=torch.float64)
    regular, rotation = diagonal_hessian(1.0, 2.0, 3.0)
    found = regular.newton(right)
    assert torch.allclose(regular.product(found.solution), right)
    assert found.definite and not regular.is_singular(found)

    flat, rotation = diagonal_hessian(1.0, 2.0, 0.0)
    image = flat.product(right)  # like a gradient, it has no part along the null space
    found = flat.newton(image)
    assert found.definite and flat.is_singular(found)
    pseudo = torch.linalg.pinv(flat.matrix[0], hermitian=True) @ image.flatten()
    assert torch.allclose(found.solution.flatten(), pseudo, rtol=1e-6)

    saddle, _ = diagonal_hessian(1.0, 2.0, -0.5)
    assert not saddle.newton(right).definite


def test_conjugate_gradients_reach_the_minimum_norm_solution_and_notice_negative_curvature():
    flat, rotation = diagonal_hessian(1.0, 2.0, 0.0)
    image = flat.product(torch.tensor([[[0.3, 1.0, -1.0]]], dtype=torch.float64))
    found = conjugate_gradients(flat.product, image, lambda w: w)
    assert found.definite
    assert torch.allclose(found.solution.flatten(), torch.linalg.pinv(flat.matrix[0]) @ image.flatten(), atol=1e-10)
    saddle, _ = diagonal_hessian(1.0, 2.0, -0.5)
    anything = torch.tensor([[[0.3, 1.0, -1.0]]], dtype=torch.float64)
    assert not conjugate_gradients(saddle.product, anything, lambda w: w).definite


def flat_clouds(debias=True, outside=0.0, num_points=4, dim=32):
    """Points among nodes that span six of many dimensions, or a little outside; large enough for a model."""
    generator = torch.Generator().manual_seed(3)
    nodes = torch.randn(2, 7, dim, generator=generator, dtype=torch.float64)
    share = torch.randn(2, num_points, 7, generator=generator, dtype=torch.float64).softmax(-1)
    points = share @ nodes + outside * torch.randn(2, num_points, dim, generator=generator, dtype=torch.float64)
    masses = simplex(2, 7, generator=generator)
    energy = make_energy(points, nodes, 20.0, simplex(2, num_points, generator=generator), masses, debias=debias)
    return energy, energy.evaluate(points)


@pytest.mark.parametrize("debias", [True, False])
def test_the_model_is_the_hessian_where_the_points_lie_in_the_hull(debias):
    energy, here = flat_clouds(debias)
    modelled, formed = hessian.hessian(energy, here), hessian.hessian(energy, here, form=True)
    assert modelled.matrix is None and modelled.leading.whole.all()
    shift = 3 * formed.unit
    expected = formed.shifted(shift).solve(here.gradient).solution
    assert torch.allclose(modelled.shifted(shift).model.solve(here.gradient), expected, rtol=1e-7, atol=1e-10)
    # It is not taken for the Hessian at other points, and not for a solution that has to be precise.
    energy, here = flat_clouds(debias, outside=0.1)
    modelled, formed = hessian.hessian(energy, here), hessian.hessian(energy, here, form=True)
    assert not modelled.leading.whole.any()
    expected = formed.shifted(shift).solve(here.gradient).solution
    # Without debiasing the plan never sees how far outside the points are.
    assert debias != torch.allclose(modelled.shifted(shift).model.solve(here.gradient), expected, rtol=1e-3)
    assert torch.allclose(modelled.shifted(shift).solve(here.gradient).solution, expected, rtol=1e-7, atol=1e-10)


def test_points_a_hair_outside_the_hull_may_use_the_model_for_rough_solutions_only():
    energy, here = flat_clouds(outside=1e-5)
    curvature = hessian.hessian(energy, here)
    system = curvature.shifted(curvature.unit)
    assert curvature.leading.whole.all()
    assert torch.equal(system.solve(here.gradient, Effort(1e-2)).solution, system.model.solve(here.gradient))
    assert not torch.equal(system.solve(here.gradient).solution, system.model.solve(here.gradient))


def test_the_leading_block_saves_products():
    generator = torch.Generator().manual_seed(5)
    nodes = torch.randn(2, 30, 24, generator=generator, dtype=torch.float64) * 0.6 ** torch.arange(24)
    start = torch.randn(2, 8, 24, generator=generator, dtype=torch.float64)
    energy = make_energy(start, nodes, 1.0)
    near = 0.01 * torch.randn(2, 8, 24, generator=generator, dtype=torch.float64)
    here = energy.evaluate(flow.follow(energy, start, 1e-6, 500).points + near)
    curvature = hessian.hessian(energy, here)
    counts = []
    for leading in (curvature.leading, None):
        calls = []
        counted = replace(
            curvature, leading=leading, product=lambda w, calls=calls: calls.append(1) or curvature.product(w)
        )
        found = counted.shifted(0.03 * curvature.unit).solve(here.gradient, Effort(1e-6))
        assert found.definite.all() and found.settled.all()
        counts.append(len(calls))
    assert counts[0] <= counts[1] / 2


def test_conjugate_gradients_use_a_guess_and_stop_at_a_length():
    matrix, _ = diagonal_hessian(1.0, 2.0, 3.0)
    right = torch.tensor([[[0.3, 1.0, -1.0]]], dtype=torch.float64)
    exact = conjugate_gradients(matrix.product, right, lambda w: w).solution
    kept = conjugate_gradients(matrix.product, right, lambda w: w, Effort(1e-3, guess=exact * (1 + 1e-5)))
    assert torch.equal(kept.solution, exact * (1 + 1e-5)) and kept.settled.all()
    better = conjugate_gradients(matrix.product, right, lambda w: w, Effort(guess=exact + 0.1))
    assert torch.allclose(better.solution, exact)
    short = conjugate_gradients(matrix.product, right, lambda w: w, Effort(longest=torch.tensor([0.01]).double()))
    assert short.solution.norm() > 0.01 and not torch.allclose(short.solution, exact) and short.settled.all()
