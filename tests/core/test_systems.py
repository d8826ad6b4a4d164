"""Linear systems with Hessians whose eigenvalues are known."""

import pytest
import torch
from helpers import random_pair

from flowpool import costs
from flowpool.core import flow, hessian
from flowpool.core.constants import FLAT, RIDGE, SINGULAR
from flowpool.core.divergence import make_energy
from flowpool.core.hessian import Curvature, curvature, dense_hessian, hessian_product
from flowpool.core.systems import System, conjugate_gradients, shifted_model

ANYTHING = torch.tensor([[[0.3, 1.0, -1.0]]], dtype=torch.float64)
KNOWN = pytest.mark.parametrize("known", [True, False], ids=["factor", "conjugate gradients"])


def rotation(size=3):
    return torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(0)).double())[0]


def system(*values, known=True):
    """The Hessian of one point with given eigenvalues, known as a matrix or by its products alone."""
    basis = rotation(len(values))
    matrix = (basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.T).unsqueeze(0)
    unit, yes = torch.ones(1, 1, dtype=torch.float64), torch.tensor([known])
    found = Curvature(matrix if known else None, None, torch.diag_embed(unit), yes, yes, unit)
    return System(found, lambda w: (matrix @ w.flatten(1).unsqueeze(-1)).view_as(w))


def by_eigenvalues(values, right, weigh):
    basis, values = rotation(len(values)), torch.tensor(values, dtype=torch.float64)
    return (basis @ (weigh(values) * (basis.T @ right.flatten()))).view_as(right)


def filtered(values, right):
    return by_eigenvalues(values, right, lambda h: h / (h.square() + FLAT**2))


@KNOWN
def test_a_newton_step_is_the_inverse_where_there_is_nothing_flat(known):
    values = (1.0, 2.0, 3.0)
    found = system(*values, known=known).newton(ANYTHING, 1e-10)
    assert torch.allclose(found.solution, filtered(values, ANYTHING), rtol=2 * FLAT)
    assert SINGULAR < float(found.flattest) <= 3.0


@KNOWN
def test_a_newton_step_leaves_flat_directions_alone(known):
    values = (1.0, 2.0, 0.0)
    gradient = system(*values).product(ANYTHING)  # no part of it lies along the flat direction
    for right in (gradient, ANYTHING) if known else (gradient,):  # conjugate gradients only damp what lies along it
        found = system(*values, known=known).newton(right, 1e-10)
        assert torch.allclose(found.solution, filtered(values, right), rtol=1e-3, atol=1e-3 * float(right.norm()))
    pseudo = by_eigenvalues(values, gradient, lambda h: torch.where(h > 0, 1 / h, 0.0))
    assert torch.allclose(filtered(values, gradient), pseudo, rtol=1e-7)
    # A pivot is a bound from above of the lowest eigenvalue; conjugate gradients need not meet what no gradient has.
    assert -FLAT < float(found.flattest) < (10 * SINGULAR if known else 1 + 1e-6)


@pytest.mark.parametrize("curvature_of", [1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1.0])
def test_the_filter_is_tikhonovs_where_it_matters_and_smaller_where_it_does_not(curvature_of):
    values = (1.0, 2.0, curvature_of)
    right = by_eigenvalues(values, ANYTHING, lambda h: torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))
    right = right / right.norm()
    found = float(system(*values).newton(right, 1e-10).solution.norm())
    expected = float(filtered(values, right).norm())
    assert found <= 1.001 * expected
    assert found >= expected * (1 - min(1.0, (2 * FLAT / curvature_of) ** 2) - 2e-3)


@KNOWN
def test_a_saddle_is_noticed(known):
    found = system(1.0, 2.0, -0.5, known=known).newton(ANYTHING, 1e-10)
    assert float(found.flattest) < -FLAT
    for shift, definite in ((0.1, False), (0.6, True)):
        saddle = system(1.0, 2.0, -0.5, known=known)
        found = saddle.solve(ANYTHING, torch.tensor([shift], dtype=torch.float64), saddle.curvature.exact)
        assert bool(found.flattest > 0) == definite


def test_conjugate_gradients_meet_negative_curvature_before_they_move():
    """The rest of a system that was never entered reads as nothing left to do, unless curvature is looked at."""
    basis = rotation()
    down = basis[:, 2].view(1, 1, 3)  # along the negative eigenvalue
    indefinite = system(1.0, 2.0, -0.5, known=False)
    found = indefinite.newton(down, 1e-10)
    assert float(found.solution.norm()) == 0.0
    assert float(found.flattest) == pytest.approx(-0.5)


def test_conjugate_gradients_use_a_guess_and_stop_at_a_length():
    given = system(1.0, 2.0, 3.0, known=False)
    zero, unit = torch.zeros(1, dtype=torch.float64), given.curvature.unit
    model = shifted_model(given.curvature, zero)

    def solved(precision=1e-12, **options):
        return conjugate_gradients(given.product, ANYTHING, model, unit, zero, precision, **options).solution

    exact = by_eigenvalues((1.0, 2.0, 3.0), ANYTHING, lambda h: 1 / h)
    assert torch.allclose(solved(), exact)
    near = exact * (1 + 1e-5)
    assert torch.equal(solved(1e-3, guess=near), near)
    assert torch.allclose(solved(guess=exact + 0.1), exact)
    short = solved(longest=torch.tensor([0.01], dtype=torch.float64))
    assert short.norm() > 0.01 and not torch.allclose(short, exact)


@pytest.mark.parametrize("cost", ["sqeuclidean", costs.Euclidean(1.5)], ids=["squared", "power"])
def test_systems_of_energies_are_those_of_their_matrix(cost, monkeypatch):
    """By the model, by conjugate gradients with it, and without any."""
    pair = random_pair(batch=2)
    energy = make_energy(pair.points, pair.nodes, 0.4, pair.point_masses, pair.masses, cost)
    here = energy.evaluate(pair.points)
    unit = energy.scales.stiffness
    shift = torch.full((2,), 3.0, dtype=torch.float64)
    matrix = dense_hessian(energy, here) + torch.diag_embed((3.0 * unit).repeat_interleave(3, -1))
    expected = torch.linalg.solve(matrix, here.gradient.flatten(1)).view_as(here.gradient)
    for most in (10**6, 0):
        monkeypatch.setattr(hessian, "MOST_FORMED", most)
        known = curvature(energy, here)
        doubtful = known._replace(exact=torch.zeros_like(known.exact), spanned=torch.zeros_like(known.spanned))
        for part in (known, doubtful):
            found = System(part, hessian_product(energy, here)).solve(here.gradient, shift, part.exact)
            assert (found.flattest > 0).all()
            gap = (found.solution - expected).norm() / expected.norm()
            assert gap < (1e-9 if bool(part.exact.all()) else 0.2)


def test_the_leading_block_saves_products():
    generator = torch.Generator().manual_seed(5)
    nodes = torch.randn(2, 30, 24, generator=generator, dtype=torch.float64) * 0.6 ** torch.arange(24)
    start = torch.randn(2, 8, 24, generator=generator, dtype=torch.float64)
    energy = make_energy(start, nodes, 1.0)
    near = 0.01 * torch.randn(2, 8, 24, generator=generator, dtype=torch.float64)
    here = energy.evaluate(flow.follow(energy, start, 1e-6, 500).points + near)
    found, product = curvature(energy, here), hessian_product(energy, here)
    shift = torch.full((2,), 0.03, dtype=torch.float64)
    counts = []
    for part in (found, found._replace(block=None, basis=None)):
        calls = []
        conjugate_gradients(
            lambda w, calls=calls: calls.append(1) or product(w),
            here.gradient, shifted_model(part, shift), part.unit, shift, 1e-6,
        )  # fmt: skip
        counts.append(len(calls))
    assert counts[0] <= counts[1] / 2


@KNOWN
@pytest.mark.parametrize("values", [(1.0, 2.0, 3.0), (1.0, 2.0, -0.3), (1.0, 1e-2, 0.0)], ids=["min", "saddle", "flat"])
@pytest.mark.parametrize("ridge", [RIDGE, 1e-8, 1e-3, 0.1])
def test_the_ridge_of_a_gradient_is_tikhonovs_on_the_normal_equations(values, ridge, known):
    found = system(*values, known=known).adjoint(ANYTHING, torch.tensor([ridge], dtype=torch.float64))
    expected = by_eigenvalues(values, ANYTHING, lambda h: torch.where(h == 0, 0.0, h / (h.square() + ridge)))
    # Along a flat direction the mixed derivatives vanish with the curvature, so that a thousandth does no harm there.
    assert torch.allclose(found.solution, expected, rtol=1e-5, atol=1e-3 if 0.0 in values else 1e-6)
    image = by_eigenvalues(values, ANYTHING, lambda h: h)
    normal = by_eigenvalues(values, found.solution, lambda h: h.square() + ridge)
    assert float(found.residual) == pytest.approx(float((normal - image).norm() / image.norm()), abs=1e-12)
    assert float(found.residual) < 1e-6
    assert torch.allclose(found.left, ANYTHING - by_eigenvalues(values, found.solution, lambda h: h), atol=1e-12)
    assert bool(found.damped) == (min(values) <= 0)


def test_a_singular_hessian_gives_the_minimum_norm_and_says_so():
    given = system(1.0, 2.0, 0.0)
    found = given.adjoint(ANYTHING, torch.tensor([RIDGE], dtype=torch.float64))
    pseudo = by_eigenvalues((1.0, 2.0, 0.0), ANYTHING, lambda h: torch.where(h > 0, 1 / h, 0.0))
    assert torch.allclose(found.solution, pseudo, atol=1e-3)
    assert torch.allclose(given.product(found.solution), given.product(pseudo), atol=1e-9)
    assert found.damped.all()


@pytest.mark.parametrize("flattest", [1e-6, 1e-3, 0.5])
def test_flat_directions_are_seen_wherever_they_lie(flattest):
    for seed in range(20):
        basis = torch.linalg.qr(torch.randn(9, 9, generator=torch.Generator().manual_seed(seed)).double())[0]
        matrix = basis @ torch.diag(torch.tensor([flattest, *torch.linspace(1, 2, 8)]).double()) @ basis.T
        unit, yes = torch.ones(1, 3, dtype=torch.float64), torch.tensor([True])
        found = Curvature(matrix.unsqueeze(0), None, torch.diag_embed(unit), yes, yes, unit)
        model = shifted_model(found, torch.full((1,), 1e-6, dtype=torch.float64))
        smallest = float(model.smallest_curvature())
        assert flattest * (1 - 1e-6) <= smallest <= float(model.smallest_pivot() - model.shift) + 1e-12
        assert smallest <= 1.2 * flattest
