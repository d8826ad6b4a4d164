"""Linear systems with Hessians whose eigenvalues are known, and with those of energies."""

import numpy as np
import pytest
import torch
from helpers import random_pair

from flowpool import costs
from flowpool.core import flow, systems
from flowpool.core.constants import FLAT, RIDGE
from flowpool.core.divergence import make_energy
from flowpool.core.hessian import dense_hessian, differentiable_gradient
from flowpool.core.systems import Spectrum, conjugate_gradients

ANYTHING = torch.tensor([[[0.3, 1.0, -1.0]]], dtype=torch.float64)


def rotation(size=3):
    return torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(0)).double())[0]


def matrix_of(*values):
    basis = rotation(len(values))
    return (basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.T).unsqueeze(0)


def spectrum(*values):
    return Spectrum(np.array(values), rotation(len(values)).numpy())


def by_eigenvalues(values, right, weigh):
    basis, values = rotation(len(values)), torch.tensor(values, dtype=torch.float64)
    return (basis @ (weigh(values) * (basis.T @ right.flatten()))).view_as(right)


@pytest.mark.parametrize("curvature_of", [0.0, 1e-8, 1e-5, 1e-4, 1e-3, 1e-2, 1.0])
def test_a_newton_step_carries_tikhonovs_filter(curvature_of):
    values = (curvature_of, 1.0, 2.0)
    found = spectrum(*values).solve(ANYTHING.numpy(), FLAT, filtered=True)
    expected = by_eigenvalues(values, ANYTHING, lambda h: h / (h.square() + FLAT**2))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-12)
    assert spectrum(*values).flattest == curvature_of


def test_an_implicit_step_has_its_shift():
    found = spectrum(-0.5, 1.0, 2.0).solve(ANYTHING.numpy(), 0.6, filtered=False)
    np.testing.assert_allclose(found, by_eigenvalues((-0.5, 1.0, 2.0), ANYTHING, lambda h: 1 / (h + 0.6)).numpy())


def products(*values):
    matrix = matrix_of(*values)
    return lambda w: (matrix @ w.flatten(1).unsqueeze(-1)).view_as(w)


def by_products(values, right, shift, precision=1e-12):
    one = torch.ones(1, dtype=torch.float64)
    return conjugate_gradients(products(*values), right, one[:, None], shift * one, precision * one)


def test_conjugate_gradients_solve_the_shifted_system():
    found, flattest = by_products((1.0, 2.0, 3.0), ANYTHING, 0.1)
    assert torch.allclose(found, by_eigenvalues((1.0, 2.0, 3.0), ANYTHING, lambda h: 1 / (h + 0.1)))
    assert 1.0 - 1e-9 <= float(flattest) <= 3.0


@pytest.mark.parametrize(("shift", "definite"), [(0.1, False), (0.6, True)])
def test_conjugate_gradients_notice_a_saddle(shift, definite):
    down = rotation()[:, 0].view(1, 1, 3)  # along the negative eigenvalue: nothing is moved, and it is told
    for right in (ANYTHING, down):
        found, flattest = by_products((-0.5, 1.0, 2.0), right, shift)
        assert (float(flattest) + shift > 0) == definite
    assert definite or float(found.norm()) == 0.0


@pytest.mark.parametrize("cost", ["sqeuclidean", costs.Euclidean(1.5)], ids=["squared", "power"])
def test_both_ways_solve_the_systems_of_an_energy(cost):
    pair = random_pair(batch=2)
    energy = make_energy(pair.points, pair.nodes, 0.4, pair.point_masses, pair.masses, cost)
    here, unit = energy.evaluate(pair.points), energy.scales.stiffness
    matrix = dense_hessian(energy, here) + torch.diag_embed((3.0 * unit).repeat_interleave(3, -1))
    expected = torch.linalg.solve(matrix, here.gradient.flatten(1)).view_as(here.gradient)
    values, vectors = systems.spectra(energy, here, energy.scales.stiffness)
    gradient, points = differentiable_gradient(energy, here)
    three, precise = torch.full((2,), 3.0, dtype=torch.float64), torch.full((2,), 1e-12, dtype=torch.float64)
    found, flattest = conjugate_gradients(
        lambda w: torch.autograd.grad(gradient, points, w, retain_graph=True)[0], here.gradient, unit, three, precise
    )
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)
    assert (flattest >= values[:, 0] - 1e-9).all()
    for cloud in range(2):
        basis = vectors[cloud] / unit[cloud].sqrt().repeat_interleave(3)[:, None]
        own = Spectrum(values[cloud].numpy(), basis.numpy()).solve(here.gradient[cloud].numpy(), 3.0, filtered=False)
        np.testing.assert_allclose(own, expected[cloud].numpy(), rtol=1e-9, atol=1e-12)


def test_a_hessian_that_is_not_finite_harms_no_other(monkeypatch):
    pair = random_pair(batch=2)
    energy = make_energy(pair.points, pair.nodes, 0.4, pair.point_masses, pair.masses)
    here = energy.evaluate(pair.points)
    expected = systems.spectra(energy, here, energy.scales.stiffness)[0][1]
    broken = dense_hessian(energy, here)
    broken[0, 0, 0] = torch.nan
    monkeypatch.setattr(systems, "dense_hessian", lambda *_: broken)
    values, _ = systems.spectra(energy, here, energy.scales.stiffness)
    assert values[0].isnan().all() and torch.allclose(values[1], expected)
    assert systems.adjoint(energy, here, pair.points, torch.zeros(2).double()).solution[0].isnan().all()


@pytest.mark.parametrize("values", [(1.0, 2.0, 3.0), (-0.3, 1.0, 2.0), (0.0, 1e-2, 1.0)], ids=["min", "saddle", "flat"])
@pytest.mark.parametrize("ridge", [RIDGE, 1e-8, 1e-3, 0.1])
def test_the_ridge_of_a_gradient_is_tikhonovs_on_the_normal_equations(values, ridge, monkeypatch):
    energy, here = one_point(values, monkeypatch)
    found = systems.adjoint(energy, here, ANYTHING, torch.tensor([ridge], dtype=torch.float64))
    expected = by_eigenvalues(values, ANYTHING, lambda h: h / (h.square() + ridge))
    # Along a flat direction rounding of the curvature counts, as the mixed derivatives vanish with it.
    assert torch.allclose(found.solution, expected, rtol=1e-9, atol=1e-3 if 0.0 in values else 1e-9)
    assert float(found.residual) < 1e-9
    assert torch.allclose(found.left, ANYTHING - by_eigenvalues(values, found.solution, lambda h: h), atol=1e-12)
    assert bool(found.damped) == (min(values) <= 0)


def one_point(values, monkeypatch):
    """An energy of one point whose stiffness is one, with a Hessian of given eigenvalues."""
    nodes = torch.randn(1, 5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    energy = make_energy(torch.zeros(1, 1, 3, dtype=torch.float64), nodes, 1.0, torch.full((1, 1), 0.5).double())
    monkeypatch.setattr(systems, "dense_hessian", lambda *_: matrix_of(*values))
    return energy, None


def test_a_ridge_in_other_coordinates(monkeypatch):
    """(H s^2 H + lambda s^-2) w = H s^2 v where a feature is s times what it is in the equations that are meant."""
    energy, here = one_point((0.5, 1.0, 2.0), monkeypatch)
    scale, ridge = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64), 0.2
    found = systems.adjoint(energy, here, ANYTHING, torch.tensor([ridge], dtype=torch.float64), scale)
    matrix, square = matrix_of(0.5, 1.0, 2.0)[0], torch.diag(scale.square())
    left = matrix @ square @ matrix + ridge * torch.diag(scale**-2)
    expected = torch.linalg.solve(left, matrix @ square @ ANYTHING.flatten())
    assert torch.allclose(found.solution.flatten(), expected)


def test_the_length_of_a_newton_step():
    pair = random_pair(batch=3)
    energy = make_energy(pair.points, pair.nodes, 0.4, pair.point_masses, pair.masses)
    near = flow.follow(energy, pair.points, 1e-10, 500).points + 1e-4
    here = energy.evaluate(near)
    length, flattest = systems.newton_step(energy, here)
    step = torch.linalg.solve(dense_hessian(energy, here), here.gradient.flatten(1))
    assert torch.allclose(length, step.norm(dim=1) / energy.scales.radius, rtol=1e-3)
    assert (flattest > 0).all()
