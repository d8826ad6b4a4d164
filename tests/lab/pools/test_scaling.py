from __future__ import annotations

import math

import numpy as np
import ot
import torch
from torch import Tensor

from flowpool.lab.pools.scaling import transport_plan


def problem(padding: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64)
    rows = torch.rand(2, 6, generator=generator, dtype=torch.float64).softmax(1)
    columns = torch.rand(2, 4, generator=generator, dtype=torch.float64).softmax(1)
    if padding:
        scores = torch.nn.functional.pad(scores, (0, padding, 0, padding), value=-math.inf)
        rows, columns = (torch.nn.functional.pad(masses, (0, padding)) for masses in (rows, columns))
    return scores, rows, columns


def test_plan_has_both_marginals_and_is_the_one_of_pot() -> None:
    scores, rows, columns = problem()
    plan = transport_plan(scores, rows, columns)
    torch.testing.assert_close(plan.sum(2), rows, rtol=0, atol=1e-12)
    torch.testing.assert_close(plan.sum(1), columns, rtol=0, atol=1e-12)
    for graph in range(2):
        expected = ot.sinkhorn(rows[graph].numpy(), columns[graph].numpy(), -scores[graph].numpy(), 1.0, stopThr=1e-14)
        np.testing.assert_allclose(plan[graph].numpy(), expected, atol=1e-10)


def test_padding_changes_nothing() -> None:
    plain, padded = transport_plan(*problem()), transport_plan(*problem(padding=3))
    torch.testing.assert_close(padded[:, :6, :4], plain, rtol=0, atol=1e-14)
    assert bool((padded[:, 6:] == 0).all()) and bool((padded[:, :, 4:] == 0).all())


def test_gradient_agrees_with_finite_differences_also_beside_padding() -> None:
    for padding in (0, 2):
        scores, rows, columns = problem(padding)
        real = scores.isfinite()

        def plan_of(values: Tensor, real: Tensor = real, rows: Tensor = rows, columns: Tensor = columns) -> Tensor:
            filled = torch.full(real.shape, -math.inf, dtype=values.dtype).masked_scatter(real, values)
            return transport_plan(filled, rows, columns)

        assert torch.autograd.gradcheck(plan_of, scores[real].clone().requires_grad_(), atol=1e-6)


def test_single_precision_marginals() -> None:
    scores, rows, columns = (tensor.float() for tensor in problem())
    plan = transport_plan(5 * scores, rows, columns)
    torch.testing.assert_close(plan.sum(2), rows, rtol=0, atol=1e-6)
    torch.testing.assert_close(plan.sum(1), columns, rtol=0, atol=1e-6)


def test_gradient_stays_finite_where_the_plan_is_a_permutation() -> None:
    scores = (1e3 * torch.eye(5, dtype=torch.float32)).unsqueeze(0).requires_grad_()
    plan = transport_plan(scores, torch.ones(1, 5), torch.ones(1, 5))
    torch.testing.assert_close(plan[0], torch.eye(5))
    (plan * torch.arange(25.0).view(1, 5, 5)).sum().backward()
    # Nothing moves a plan that is at a corner of the polytope.
    torch.testing.assert_close(scores.grad, torch.zeros(1, 5, 5))
