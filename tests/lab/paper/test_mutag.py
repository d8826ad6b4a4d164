"""Pooled MUTAG molecules: valid couplings, and less lost than by choosing atoms."""

import pytest
import torch

from flowpool.lab.paper import mutag


def test_pooled_molecules_keep_more_than_chosen_atoms() -> None:
    record = mutag.compute(num_graphs=10, molecule=4)
    assert bool(record.converged.all())
    assert float(record.lost.mean()) < 0.5 * float(record.lost_by_choice.mean())
    count = len(record.atoms)
    torch.testing.assert_close(
        record.plan.sum(0), torch.full((count,), 1 / count, dtype=torch.float64), atol=1e-8, rtol=0
    )
    share = torch.full((mutag.NUM_POINTS,), 1 / mutag.NUM_POINTS, dtype=torch.float64)
    torch.testing.assert_close(record.plan.sum(1), share, atol=1e-6, rtol=0)


def test_nothing_is_lost_by_the_cloud_itself() -> None:
    cloud = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert mutag.lost_share(cloud, cloud) == pytest.approx(0, abs=1e-12)
    assert mutag.lost_share(cloud.mean(0, keepdim=True), cloud) == pytest.approx(1)


def test_principal_axes_find_a_plane() -> None:
    generator = torch.Generator().manual_seed(1)
    plane, _ = torch.linalg.qr(torch.randn(5, 2, generator=generator, dtype=torch.float64))
    inside = torch.randn(30, 2, generator=generator, dtype=torch.float64) @ plane.T + 3
    mean, directions, share = mutag.principal_axes(inside)
    assert share == pytest.approx(1)
    torch.testing.assert_close((inside - mean) @ directions @ directions.T + mean, inside)
