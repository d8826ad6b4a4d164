r"""The entropic transport from the nodes of each graph to M points that all graphs give the same shares.

Node j divides its mass among the points by :math:`A_{ij} = \mathrm{softmax}_i(s_{ij} + f_i)`, given scores s, and f is
such that :math:`\sum_j b_j A_{ij} = a_i`. That f maximises a concave function of M unknowns, the semi-dual.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowpool.core.constants import BALANCED, COOLING, DEFINITE, HALFWAY, MOST_STEPS, WIDE
from flowpool.core.measures import Clouds
from flowpool.core.once import refuse_second_derivatives
from flowpool.engines.devices import opaque
from flowpool.step.ragged import arrays, ragged_sums

_NOTHING = 1e-30  # keeps zero by zero away


def balanced(scores: Tensor, masses: Tensor, shares: Tensor, ptr: Tensor, compiled: bool) -> Tensor:
    """A, how each node divides its mass, ``(N, M)``.

    Differentiable in the scores ``(N, M)``, the masses b of the nodes ``(N,)`` and the shares a of the points ``(M,)``.
    """
    portions: Tensor = _Balance.apply(scores, masses, shares, ptr, compiled)[0]
    return portions


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, masses: Tensor, shares: Tensor, ptr: Tensor, compiled: bool
    ) -> tuple[Tensor, Tensor]:
        portions, factor = balance_shares(scores, masses, shares, ptr, compiled)
        ctx.save_for_backward(portions, masses, ptr, factor)
        ctx.compiled = compiled
        ctx.mark_non_differentiable(factor)
        return portions, factor

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        refuse_second_derivatives()
        portions, masses, ptr, factor = ctx.saved_tensors
        to_scores, to_masses, to_shares = balance_adjoint(portions, masses, ptr, factor, upstream, ctx.compiled)
        return to_scores, to_masses, to_shares.sum(0), None, None


def _shapes(scores: Tensor, masses: Tensor, shares: Tensor, ptr: Tensor, compiled: bool) -> tuple[Tensor, Tensor]:
    num_graphs, num_points = ptr.shape[0] - 1, scores.shape[1]
    return scores.new_empty(scores.shape), scores.new_empty(num_graphs, num_points, num_points)


def _adjoint_shapes(
    portions: Tensor, masses: Tensor, ptr: Tensor, factor: Tensor, upstream: Tensor, compiled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return portions.new_empty(portions.shape), masses.new_empty(masses.shape), factor.new_empty(factor.shape[:2])


@opaque(_shapes)
def balance_shares(
    scores: Tensor, masses: Tensor, shares: Tensor, ptr: Tensor, compiled: bool
) -> tuple[Tensor, Tensor]:
    """A ``(N, M)``, and the Cholesky factor of minus the Hessian of the semi-dual, ``(B, M, M)``."""
    if compiled:
        from flowpool.step import balance_kernels as balance

        values, weights, targets, offsets = arrays(scores, masses, shares, ptr)
        portions, factor = balance.solve(values, weights, targets, offsets, torch.get_num_threads())
        return torch.from_numpy(portions), torch.from_numpy(factor)
    return solve_in_torch(scores, masses, shares, ptr)


@opaque(_adjoint_shapes)
def balance_adjoint(
    portions: Tensor, masses: Tensor, ptr: Tensor, factor: Tensor, upstream: Tensor, compiled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``<upstream, A>`` in scores ``(N, M)``, masses ``(N,)`` and, graph by graph, shares ``(B, M)``."""
    if compiled:
        from flowpool.step import balance_kernels as balance

        values, weights, offsets, factors, change = arrays(portions, masses, ptr, factor, upstream)
        found = balance.adjoint(values, weights, offsets, factors, change, torch.get_num_threads())
        to_scores, to_masses, to_shares = map(torch.from_numpy, found)
        return to_scores, to_masses, to_shares
    return adjoint_in_torch(portions, masses, ptr, factor, upstream)


def solve_in_torch(scores: Tensor, masses: Tensor, shares: Tensor, ptr: Tensor) -> tuple[Tensor, Tensor]:
    """What :func:`balance_shares` gives back, on any device.

    By Newton's method. The third derivative along a direction is bounded by the second times the range of the
    direction, so log(1 + range) / range of Newton's step always ascends (Sun and Tran-Dinh, 2019) and nothing has to be
    searched. Such steps are short where epsilon is small: it is then lowered bit by bit.
    """
    clouds = Clouds.from_ptr(scores, masses, ptr)
    heat = _first_heat(clouds)  # (B, 1), of each graph: it never feels what the others need
    # One step of Sinkhorn's. No node leaves a point out as long as it is hot, so that no logarithm is that of zero.
    received = clouds.sum(masses.unsqueeze(-1) * (scores / heat[clouds.batch]).softmax(-1))  # (B, M)
    potential = torch.where(clouds.sizes.unsqueeze(-1) > 0, shares.log() - received.log(), 0.0)
    for _ in range(MOST_STEPS):
        missing, factor = _newton_system(clouds, scores / heat[clouds.batch], potential, shares)
        step = torch.cholesky_solve(missing.unsqueeze(-1), factor).squeeze(-1)
        width = step.amax(-1, keepdim=True) - step.amin(-1, keepdim=True) + _NOTHING
        step = step * width.log1p() / width
        error = (missing.abs() / shares).amax(-1, keepdim=True)  # (B, 1); that of NaN is never too large
        going = error > torch.where(heat > 1, HALFWAY, BALANCED)
        if not bool((going | (heat > 1)).any()):
            break
        cooler = (heat / COOLING).clamp(min=1)
        potential = torch.where(going, potential + step, potential * heat / cooler)
        heat = torch.where(going, heat, cooler)
    return (scores + (potential + step)[clouds.batch]).softmax(-1), factor


def _first_heat(clouds: Clouds) -> Tensor:
    """Factor by which epsilon is first enlarged, ``(B, 1)``, so that the scores of a node are not too far apart."""
    ranges = clouds.nodes.amax(-1) - clouds.nodes.amin(-1)  # (N,)
    widest = ranges.new_zeros(clouds.num_graphs).scatter_reduce(0, clouds.batch, ranges, "amax").unsqueeze(-1)
    return torch.where(widest > WIDE, widest / WIDE, 1.0)  # a range of NaN is left alone


def _newton_system(clouds: Clouds, scores: Tensor, potential: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of the semi-dual ``(B, M)``, and the Cholesky factor of minus its Hessian ``(B, M, M)``."""
    portions = (scores + potential[clouds.batch]).softmax(-1)  # (N, M)
    plan = clouds.masses.unsqueeze(-1) * portions
    received = clouds.sum(plan)
    missing = torch.where(clouds.sizes.unsqueeze(-1) > 0, shares - received, 0.0)
    identity = torch.eye(scores.shape[1], dtype=scores.dtype, device=scores.device)
    # What stands on the diagonal is the sum of the rest of its row: no rounding can make this indefinite.
    shared = ragged_sums(plan, portions, clouds.ptr, False) * (1 - identity)  # (B, M, M)
    # The constant is free and changes nothing; the outer product ties it down.
    tied = received.unsqueeze(-1) * received.unsqueeze(-2) + DEFINITE * identity
    return missing, torch.linalg.cholesky_ex(torch.diag_embed(shared.sum(-1)) - shared + tied).L


def adjoint_in_torch(
    portions: Tensor, masses: Tensor, ptr: Tensor, factor: Tensor, upstream: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`balance_adjoint` gives back, on any device.

    The derivative of the maximum f is that of one Newton step from it, and A is a softmax of scores and f.
    """
    clouds = Clouds.from_ptr(portions, masses, ptr)

    def through_softmax(change: Tensor) -> Tensor:
        return portions * (change - (portions * change).sum(-1, keepdim=True))

    direct = through_softmax(upstream)
    to_shares = torch.cholesky_solve(clouds.sum(direct).unsqueeze(-1), factor).squeeze(-1)  # (B, M)
    answer = to_shares[clouds.batch]  # (N, M)
    to_scores = direct - masses.unsqueeze(-1) * through_softmax(answer)
    return to_scores, -(portions * answer).sum(-1), to_shares
