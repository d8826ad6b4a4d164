"""Plans against costs: a closed form for two by two, corners of the polygon, and the effect of epsilon."""

import pytest
import torch

from flowpool.lab.paper import coupling


def test_two_by_two_is_a_logistic_curve() -> None:
    entries = torch.linspace(-1, 1, 7, dtype=torch.float64)
    costs = torch.zeros(7, 2, 2, dtype=torch.float64)
    costs[:, 0, 0] = entries
    half = torch.full((2,), 0.5, dtype=torch.float64)
    found = coupling.plans(costs, half, half, 0.2)[:, 0, 0]
    torch.testing.assert_close(found, torch.sigmoid(-entries / (2 * 0.2)) / 2, atol=1e-10, rtol=0)


def test_unregularised_plans_are_corners() -> None:
    record = coupling.compute(num_values=13, num_levels=3)
    corners = coupling.polygon()
    assert len(corners) == 6
    for plan in (record.before[0.0], record.after[0.0]):
        assert float((corners - plan[0, :2]).norm(dim=1).min()) < 1e-9


def test_regularisation_tames_the_jump() -> None:
    record = coupling.compute()
    assert len(record.entry[0.0].unique(dim=0)) <= 3 + 1  # steps, up to rounding
    small, larger = (float((record.after[e] - record.before[e]).abs().sum()) for e in (coupling.SMALL, coupling.LARGER))
    assert record.moved_exact > small > 2 * larger
    assert bool((record.moved.diff() < 0).all())
    assert coupling.steepest(record, coupling.SMALL) == pytest.approx(
        10 * coupling.steepest(record, coupling.LARGER), rel=0.2
    )
