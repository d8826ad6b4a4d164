from dataclasses import replace

import torch
from helpers import random_pair

from flowpool.core import flow, hessian, implicit
from flowpool.core.constants import RIDGE
from flowpool.core.divergence import make_energy


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
    found, adjoint = implicit.vector_jacobian(energy, here, cotangent, torch.zeros(2).double(), {"nodes"})
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


def test_gradients_by_the_model_and_by_products_alone_agree(monkeypatch):
    energy, here = solved_problem(cost=lambda x, y: (x - y).square().sum(-1) + (x - y).pow(4).sum(-1))
    cotangent = torch.randn(here.points.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = {"nodes", "masses", "epsilon", "point_masses"}
    ridge = torch.full((2,), RIDGE, dtype=torch.float64)
    direct, _ = implicit.vector_jacobian(energy, here, cotangent, ridge, wanted)
    monkeypatch.setattr(hessian, "MOST_FORMED", 1)
    large, adjoint = implicit.vector_jacobian(energy, here, cotangent, ridge, wanted)
    assert adjoint.residual.max() < 1e-7
    for one, other in zip(direct[:4], large[:4], strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)
