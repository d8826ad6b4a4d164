from dataclasses import replace

import pytest
import torch
from helpers import random_pair

from flowpool.core import flow
from flowpool.core.divergence import make_energy
from flowpool.core.implicit import implicit


def solved_problem(num_points=3, num_nodes=7, **options):
    pair = random_pair(batch=2, num_points=num_points, num_nodes=num_nodes, dim=2)
    energy = make_energy(pair.points, pair.nodes, 0.5, pair.point_masses, pair.masses, **options)
    return energy, flow.follow(energy, pair.points, 1e-11, 1000)


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("name", ["nodes", "masses", "point_masses", "epsilon"])
def test_product_with_the_jacobian_by_solving_again_from_the_solution(name, debias):
    energy, ended = solved_problem(debias=debias)
    generator = torch.Generator().manual_seed(0)
    cotangent = torch.randn(ended.points.shape, generator=generator, dtype=torch.float64)
    value = getattr(energy, name)
    direction = torch.randn(value.shape, generator=generator, dtype=torch.float64)
    if name.endswith("masses"):
        direction = 0.1 * (direction - direction.mean(-1, keepdim=True))
    leaf = value.clone().requires_grad_()
    traced = replace(energy, **{name: leaf})
    here = energy.evaluate(ended.points, ended.potential.transpose(0, 1), 1e-13)
    number, adjoint = implicit(traced, here, cotangent, torch.zeros(2).double())
    (found,) = torch.autograd.grad(number, leaf)
    assert adjoint.residual.max() < 1e-8 and not adjoint.damped.any()

    def moved(step):
        return flow.follow(replace(energy, **{name: value + step * direction}), ended.points, 1e-12, 200).points

    step = 1e-5
    expected = (cotangent * (moved(step) - moved(-step)) / (2 * step)).sum()
    assert torch.allclose((found * direction).sum(), expected, rtol=1e-6, atol=1e-8)
