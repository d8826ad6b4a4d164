"""Entropic transport plans by Sinkhorn's scaling, with the exact gradient of the converged plan."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

MAX_ITERATIONS = 500

# Relative to the masses. It keeps the backward system solvable when a plan has become a permutation; away
# from that limit its effect is below the rounding of single precision.
RIDGE = 1e-10


def transport_plan(scores: Tensor, row_masses: Tensor, column_masses: Tensor) -> Tensor:
    r"""Plans that maximise score plus entropy under given marginals.

    .. math::
        P = \mathrm{diag}(e^f) \, e^{K} \, \mathrm{diag}(e^g), \qquad P 1 = a, \quad P^\top 1 = b

    Scaling stops once the columns agree with b to rounding (the rows always do), or after 500 rounds. The
    gradient is the one of the limit, from one linear system, and does not remember the rounds.

    Args:
        scores: K, minus cost over epsilon, ``(B, N, M)``; minus infinity in padded rows and columns.
        row_masses: a, ``(B, N)``; zero in padded rows.
        column_masses: b, ``(B, M)``; zero in padded columns. Each graph's two masses have the same sum.

    Returns:
        P, ``(B, N, M)``, zero in padded rows and columns.
    """
    plan: Tensor = _TransportPlan.apply(scores, row_masses, column_masses)
    return plan


class _TransportPlan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, scores: Tensor, row_masses: Tensor, column_masses: Tensor) -> Tensor:
        plan = _scale(scores.double(), row_masses.double(), column_masses.double(), _tolerance(scores.dtype))
        ctx.save_for_backward(plan, row_masses, column_masses)
        return plan.to(scores.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, plan_gradient: Tensor) -> tuple[Tensor, None, None]:
        r"""Adjoint of dP = P * (dK + df + dg) with df, dg such that both marginals stay fixed.

        With W = P * V the multipliers solve [diag(a), P; P^T, diag(b)] (alpha, beta) = (W 1, W^T 1); alpha is
        eliminated, which leaves one M x M system per graph.
        """
        plan, row_masses, column_masses = ctx.saved_tensors  # type: ignore[attr-defined]
        # Padded rows and columns of the plan are zero; any positive mass there gives a zero multiplier.
        rows = torch.where(row_masses > 0, row_masses, 1).double()  # (B, N)
        columns = torch.where(column_masses > 0, column_masses, 1).double()  # (B, M)
        weighted = plan * plan_gradient.double()  # (B, N, M)
        row_sums, column_sums = weighted.sum(2), weighted.sum(1)  # (B, N), (B, M)

        conditional = plan / rows.unsqueeze(2)  # (B, N, M), rows sum to one
        system = torch.diag_embed(columns * (1 + RIDGE)) - plan.mT @ conditional  # (B, M, M), S 1 = 0
        # f + c, g - c is the same plan: the rank-one term fixes that constant.
        system = system + column_masses.double().unsqueeze(2) * column_masses.double().unsqueeze(1)
        right = column_sums - (conditional * row_sums.unsqueeze(2)).sum(1)  # (B, M)
        beta = torch.linalg.solve(system, right)  # (B, M)
        alpha = row_sums / rows - (conditional * beta.unsqueeze(1)).sum(2)  # (B, N)
        gradient = weighted - plan * (alpha.unsqueeze(2) + beta.unsqueeze(1))
        return gradient.to(plan_gradient.dtype), None, None


def _scale(scores: Tensor, row_masses: Tensor, column_masses: Tensor, tolerance: float) -> Tensor:
    log_rows, log_columns = row_masses.log(), column_masses.log()
    row_is_real, column_is_real = row_masses > 0, column_masses > 0

    def row_potential(g: Tensor) -> Tensor:
        return torch.where(row_is_real, log_rows - (scores + g.unsqueeze(1)).logsumexp(2), 0)

    def column_potential(f: Tensor) -> Tensor:
        return torch.where(column_is_real, log_columns - (scores + f.unsqueeze(2)).logsumexp(1), 0)

    g = torch.zeros_like(column_masses)
    f = row_potential(g)
    for _ in range(MAX_ITERATIONS):
        next_g = column_potential(f)
        # Column sums of the present plan are b * exp(g - next_g).
        error = float((g - next_g).expm1().abs().max())
        if error <= tolerance:
            break
        g = next_g
        f = row_potential(g)
    return (scores + f.unsqueeze(2) + g.unsqueeze(1)).exp()


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-13 if dtype == torch.float64 else 1e-7
