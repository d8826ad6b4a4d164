"""Condition number of A + lambda I: against the closed form beyond the threshold, and the effect of lambda."""

import pytest
import torch

from flowpool.lab.paper import hessian


@pytest.fixture(scope="module")
def record() -> hessian.Spectra:
    return hessian.compute(num_clouds=4, num_levels=3)  # epsilon 0.001, 0.1, 10


def test_condition_of_known_eigenvalues() -> None:
    eigenvalues = torch.tensor([-2.0, 1.0, 4.0])
    assert float(hessian.condition(eigenvalues, 0.0)) == 16
    assert float(hessian.condition(eigenvalues, 2.0)) == pytest.approx(18 / 3)


def test_closed_form_beyond_the_threshold(record: hessian.Spectra) -> None:
    theory = (1 - record.threshold / 10).pow(-2)
    torch.testing.assert_close(hessian.condition(record.minimum[-1], 0.0), theory, rtol=1e-5, atol=0)


def test_frozen_plan_gives_the_identity(record: hessian.Spectra) -> None:
    frozen = torch.full_like(record.minimum[0], 2 / hessian.NUM_POINTS)
    found = record.minimum[0].median(0).values  # a cloud at a tie may differ
    torch.testing.assert_close(found, frozen[0], rtol=1e-3, atol=0)


def test_debiasing_turns_the_trend_around(record: hessian.Spectra) -> None:
    plain, debiased = (hessian.condition(x, 1e-6).median(1).values for x in (record.minimum, record.debiased))
    assert float(plain[-1]) < float(plain[1])
    assert float(debiased[-1]) > 100 * float(debiased[1])
