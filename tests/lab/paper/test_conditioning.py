"""Condition numbers: derivatives against differences, the limit of large epsilon, the fall of mean and deviation."""

import pytest
import torch

from flowpool.core.divergence import make_energy
from flowpool.lab.paper import conditioning


def test_node_jacobian_is_the_difference_quotient() -> None:
    points, nodes = conditioning.clouds(2, seed=5)
    energy = make_energy(points, nodes, 0.5, debias=False)
    jacobian = conditioning.node_jacobian(energy, energy.evaluate(points, tolerance=1e-14))
    step = 1e-6
    sides = []
    for sign in (1, -1):
        moved = nodes.clone()
        moved[:, 3, 1] += sign * step
        sides.append(make_energy(points, moved, 0.5, debias=False).evaluate(points, tolerance=1e-14).gradient)
    quotient = ((sides[0] - sides[1]) / (2 * step)).flatten(1)
    torch.testing.assert_close(jacobian[:, :, 3 * 2 + 1], quotient, atol=1e-7, rtol=1e-5)


def test_limit_of_large_epsilon() -> None:
    points, nodes = conditioning.clouds(5, seed=1)
    found = conditioning.condition_numbers(points, nodes, 1e6, debias=False)
    for kappa, limit in zip(found, conditioning.limits(points, nodes), strict=True):
        torch.testing.assert_close(kappa, limit, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["points", "nodes"])
def test_mean_and_deviation_fall_with_epsilon(name: str) -> None:
    record = conditioning.compute(num_clouds=12, num_levels=5)  # epsilon 0.001, 0.01, 0.1, 1, 10
    kappa = getattr(record, name)
    assert float(kappa[1].mean()) > float(kappa[3].mean()) > float(kappa[4].mean())
    assert float(kappa[1].std()) > float(kappa[4].std())
    assert abs(float(kappa[4].mean()) - 1) < 0.5


def test_debiased_numbers_do_not_tend_to_one() -> None:
    record = conditioning.compute(num_clouds=12, num_levels=2)
    assert float(record.debiased_points[-1].mean()) > 2
