import pytest
import torch
from helpers import random_pair

from flowpool import costs
from flowpool.core.divergence import make_energy
from flowpool.core.hessian import dense_hessian, differentiable_gradient

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
    step = 1e-5
    ahead, behind = (energy.evaluate(here.points + s * direction).gradient for s in (step, -step))
    expected = (ahead - behind) / (2 * step)
    by_matrix = (dense_hessian(energy, here) @ direction.flatten(1).unsqueeze(-1)).view_as(direction)
    assert torch.allclose(by_matrix, expected, rtol=1e-6, atol=1e-7)
    gradient, points = differentiable_gradient(energy, here)
    (product,) = torch.autograd.grad(gradient, points, direction)
    assert torch.allclose(product, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("cost", COSTS, ids=IDS)
def test_the_formula_is_what_autograd_gives_row_by_row(cost, debias):
    energy, here = some_energy(cost, debias, num_points=3, dim=2)
    gradient, points = differentiable_gradient(energy, here)
    rows = [
        torch.autograd.grad(gradient[:, i, d].sum(), points, retain_graph=True)[0] for i in range(3) for d in range(2)
    ]
    assert torch.allclose(dense_hessian(energy, here), torch.stack([row.flatten(1) for row in rows], 1), atol=1e-9)


def test_a_cost_without_second_derivative_at_the_points_themselves():
    """Whose cost to themselves is constant: |x - y|^3 by a norm has no second derivative there that autograd knows."""
    pair = random_pair(batch=1)
    energies = [
        make_energy(pair.points, pair.nodes, 0.4, pair.point_masses, pair.masses, cost)
        for cost in (costs.Euclidean(3.0), lambda x, y: (x - y).norm(dim=-1) ** 3)
    ]
    from dataclasses import replace

    plain = replace(energies[1], geometry=replace(energies[1].geometry, constant=True))
    one, other = (dense_hessian(energy, energy.evaluate(pair.points)) for energy in (energies[0], plain))
    assert torch.allclose(one, other, atol=1e-10)
