import pytest
import torch
from helpers import random_pair, simplex

from flowpool import costs
from flowpool.core import hessian
from flowpool.core.divergence import make_energy
from flowpool.core.hessian import curvature, dense_hessian, hessian_product

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
    assert torch.allclose(hessian_product(energy, here)(direction), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("debias", [True, False])
def test_closed_form_equals_autograd(debias):
    energy, here = some_energy(debias=debias)
    points = here.points.clone().requires_grad_()
    by_autograd = hessian.dense_by_autograd(energy.gradient(points, here), points)
    assert torch.allclose(hessian.squared_euclidean_hessian(energy, here), by_autograd, atol=1e-10)


@pytest.mark.parametrize("cost", COSTS[1:], ids=IDS[1:])
def test_of_other_costs_the_hessian_is_formed_while_it_is_small(cost, monkeypatch):
    energy, here = some_energy(cost)
    small = curvature(energy, here)
    assert torch.equal(small.block, dense_hessian(energy, here)) and small.exact.all()
    monkeypatch.setattr(hessian, "MOST_FORMED", 3)
    large = curvature(energy, here)
    assert large.block is None and not large.exact.any() and not large.spanned.any()
    assert torch.equal(large.likeness, torch.diag_embed(energy.scales.stiffness))


def flat_clouds(debias=True, outside=0.0, num_points=4, dim=32):
    """Points among nodes that span six of many dimensions, or a little outside."""
    generator = torch.Generator().manual_seed(3)
    nodes = torch.randn(2, 7, dim, generator=generator, dtype=torch.float64)
    share = torch.randn(2, num_points, 7, generator=generator, dtype=torch.float64).softmax(-1)
    points = share @ nodes + outside * torch.randn(2, num_points, dim, generator=generator, dtype=torch.float64)
    masses = simplex(2, 7, generator=generator)
    points = points - (masses.unsqueeze(-1) * nodes).sum(1, keepdim=True)
    nodes = nodes - (masses.unsqueeze(-1) * nodes).sum(1, keepdim=True)
    energy = make_energy(points, nodes, 20.0, simplex(2, num_points, generator=generator), masses, debias=debias)
    return energy, energy.evaluate(points)


def modelled(found):
    """The model ``E^T H_EE E + L (x) (I - E^T E)`` of a curvature, ``(B, M D, M D)``."""
    batch, num_points, dim = len(found.basis), found.likeness.shape[-1], found.basis.shape[-1]
    block = found.block.tril() + found.block.tril(-1).transpose(-1, -2)
    size = block.shape[-1] // num_points
    inside = torch.einsum(
        "biekc,bed,bcf->bidkf", block.view(batch, num_points, size, num_points, size), found.basis, found.basis
    )
    others = torch.eye(dim, dtype=block.dtype) - found.basis.transpose(-1, -2) @ found.basis
    outside = torch.einsum("bik,bdf->bidkf", found.likeness, others)
    return (inside + outside).reshape(batch, num_points * dim, num_points * dim)


@pytest.mark.parametrize("debias", [True, False])
def test_the_model_is_the_hessian_where_the_points_lie_in_the_hull(debias):
    energy, here = flat_clouds(debias)
    found = curvature(energy, here)
    assert found.spanned.all() and found.exact.all()
    assert torch.allclose(modelled(found), dense_hessian(energy, here), atol=1e-10)
    # Farther out the model still knows that the nodes span nothing else, but is not the Hessian.
    energy, here = flat_clouds(debias, outside=0.1)
    found = curvature(energy, here)
    assert found.spanned.all() and not found.exact.any()
    # Without debiasing the plan never sees how far outside the points are.
    assert debias != torch.allclose(modelled(found), dense_hessian(energy, here), atol=1e-6)


def test_points_a_hair_outside_the_hull_change_the_hessian_by_less():
    energy, here = flat_clouds(outside=1e-5)
    found = curvature(energy, here)
    assert found.exact.all()
    assert torch.allclose(modelled(found), dense_hessian(energy, here), atol=1e-4)


def test_a_hull_of_many_directions_is_not_spanned():
    energy, here = some_energy(num_points=40, num_nodes=7, dim=3)
    found = curvature(energy, here)
    assert found.basis.shape[1] == 1 and not found.spanned.any() and not found.exact.any()
    assert found.block.shape == (2, 40, 40)
