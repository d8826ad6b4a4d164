from dataclasses import replace

import pytest
import torch
from helpers import random_pair

from flowpool.core import flow, hessian, implicit
from flowpool.core.divergence import make_energy
from flowpool.core.hessian import Hessian


def solved_problem(num_points=3, num_nodes=7, **options):
    pair = random_pair(batch=2, num_points=num_points, num_nodes=num_nodes, dim=2)
    energy = make_energy(pair.points, pair.nodes, 0.5, pair.point_masses, pair.masses, **options)
    ended = flow.follow(energy, pair.points, 1e-11, 1000)
    return energy, energy.evaluate_from(ended.points, ended.potential, ended.self_potential, 1e-13)


def test_product_with_the_jacobian_by_resolving_from_the_solution():
    energy, here = solved_problem()
    generator = torch.Generator().manual_seed(0)
    cotangent = torch.randn(here.points.shape, generator=generator, dtype=torch.float64)
    direction = torch.randn(energy.nodes.shape, generator=generator, dtype=torch.float64)
    found, adjoint = implicit.vector_jacobian(energy, here, cotangent, 0.0, {"nodes"})
    assert adjoint.residual.max() < 1e-8 and not adjoint.damped.any()

    def moved(step):
        return flow.follow(replace(energy, nodes=energy.nodes + step * direction), here.points, 1e-12, 200).points

    step = 1e-5
    difference = (moved(step) - moved(-step)) / (2 * step)
    expected = (cotangent * difference).sum((-1, -2))
    assert torch.allclose((found.nodes * direction).sum((-1, -2)), expected, rtol=1e-6, atol=1e-8)


def test_closed_form_equals_autograd():
    energy, here = solved_problem()
    solution = torch.randn(here.points.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = implicit.squared_euclidean_gradients(energy, here, solution)
    leaves = [x.clone().requires_grad_() for x in (energy.nodes, energy.masses, energy.epsilon)]
    traced = replace(energy, nodes=leaves[0], masses=leaves[1], epsilon=leaves[2])
    expected = torch.autograd.grad(traced.gradient(here.points, here), leaves, -solution)
    assert torch.allclose(found.nodes, expected[0], atol=1e-10)
    gap = found.masses - expected[1]  # defined up to a constant per cloud
    assert torch.allclose(gap, gap[:, :1].expand_as(gap), atol=1e-10)
    assert torch.allclose(found.epsilon, expected[2], atol=1e-10)


def test_direct_and_iterative_solves_agree(monkeypatch):
    energy, here = solved_problem()
    cotangent = torch.randn(here.points.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = {"nodes", "masses", "epsilon", "point_masses"}
    direct, _ = implicit.vector_jacobian(energy, here, cotangent, 1e-18, wanted)
    monkeypatch.setattr(hessian, "DIRECT_LIMIT", 1)
    large, adjoint = implicit.vector_jacobian(energy, here, cotangent, 1e-18, wanted)
    assert adjoint.residual.max() < 1e-8
    for one, other in zip(direct[:4], large[:4], strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-8)


def given_hessian(matrix):
    unit = torch.ones(len(matrix), 1, dtype=matrix.dtype)
    return Hessian(matrix, hessian._matrix_product(matrix), unit, torch.diag_embed(unit))


@pytest.mark.parametrize("values", [(1.0, 2.0, 3.0), (1.0, 2.0, -0.3), (1.0, 1e-3, 0.0)], ids=["min", "saddle", "flat"])
@pytest.mark.parametrize("ridge", [1e-18, 1e-3, 0.1])
def test_ridge_is_tikhonov_on_the_normal_equations(values, ridge):
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))[0]
    matrix = basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.T
    cotangent = torch.randn(1, 1, 3, generator=generator, dtype=torch.float64)
    curvature = given_hessian(matrix.unsqueeze(0))
    found = implicit.solve_adjoint(curvature, cotangent, ridge)
    values = torch.tensor(values, dtype=torch.float64)
    weights = torch.where(values == 0, 0.0, values / (values.square() + ridge))
    expected = basis @ (weights * (basis.T @ cotangent.flatten()))
    assert torch.allclose(found.solution.flatten(), expected, rtol=1e-5, atol=1e-9)
    assert found.residual.max() < 1e-5
    large = implicit.solve_adjoint(replace(curvature, matrix=None), cotangent, ridge)
    if ridge > 1e-12:
        assert torch.allclose(large.solution.flatten(), expected, rtol=1e-5, atol=1e-9)


def test_singular_hessian_gives_the_minimum_norm_and_says_so():
    matrix = torch.diag(torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)).unsqueeze(0)
    cotangent = torch.ones(1, 1, 3, dtype=torch.float64)
    found = implicit.solve_adjoint(given_hessian(matrix), cotangent, 1e-18)
    assert torch.allclose(found.solution.flatten(), torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64))
    assert found.damped.all()
