"""Batches of symmetric linear systems: by their factors, or by conjugate gradients with a model of the matrix.

Nothing here waits for a result on the host unless it is told that it may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_CG_TOLERANCE = 1e-10
_CG_ROUNDS = 4  # iterations of conjugate gradients for each round of an inner problem
OUTSIDE = 5e-4  # distance of the points from the hull, in units of epsilon, that makes the model inexact by as much


class Solved(NamedTuple):
    """Solution of a batch of symmetric linear systems.

    Attributes:
        solution: ``(B, M, D)``.
        definite: the matrix is positive definite, as far as was seen, ``(B,)`` bool.
        flattest: smallest curvature met, ``(B,)``: a bound from above of the lowest eigenvalue.
        settled: the precision asked for was reached, or cannot be, ``(B,)`` bool.
    """

    solution: Tensor
    definite: Tensor
    flattest: Tensor
    settled: Tensor


class Effort(NamedTuple):
    """How far an iterative solution is taken; a factorised one is exact at once.

    Attributes:
        precision: size of the rest, relative to the right-hand side and in the metric of the model, at which to stop:
            a number, or one for each cloud, ``(B,)``.
        rounds: see :func:`flowpool.core.sinkhorn.solve`.
        longest: length of the solution from which on it is of no use, ``(B,)``.
        guess: where to start, ``(B, M, D)``; ``None``: at zero.
    """

    precision: Tensor | float = _CG_TOLERANCE
    rounds: int | None = None
    longest: Tensor | None = None
    guess: Tensor | None = None


PRECISE = Effort()


class System(Protocol):
    """A batch of symmetric matrices that can be solved with."""

    def solve(self, right: Tensor, effort: Effort = ...) -> Solved:
        """Solution for the right-hand side ``(B, M, D)``."""


class Factorised(NamedTuple):
    """Matrices with their Cholesky factors."""

    factor: Tensor  # (B, M D, M D)
    exists: Tensor  # (B,) bool
    flattest: Tensor  # (B,), smallest pivot

    def solve(self, right: Tensor, effort: Effort = PRECISE) -> Solved:
        solution = torch.cholesky_solve(right.flatten(1).unsqueeze(-1), self.factor).view_as(right)
        definite = self.exists & (solution.abs().amax((-1, -2)) < torch.inf)
        return Solved(solution, definite, torch.where(definite, self.flattest, 0.0), torch.ones_like(definite))


class Leading(NamedTuple):
    """The Hessian in the leading directions of the nodes."""

    basis: Tensor  # (B, K, D), E: orthonormal, or zero where a cloud has fewer
    matrix: Tensor  # (B, M K, M K), its lower triangle at least
    spanned: Tensor  # (B,) bool, they span the hull
    whole: Tensor  # (B,) bool, and the points lie in it


class Model(NamedTuple):
    r"""What conjugate gradients take for the Hessian: a dense block for the leading directions, 2 Q for all others.

    .. math:: H \approx E^\top H_{EE} E + 2 Q \otimes (I - E^\top E)

    It is exact for directions outside the hull of the nodes once the points lie in it, and close for directions along
    which the nodes vary by little against epsilon.
    """

    others: Tensor  # (B, M, M), factor of 2 Q + shift
    block: Tensor | None  # (B, M K, M K), factor of the block, shifted as well
    leading: Leading | None
    exists: Tensor  # (B,) bool, the model is positive definite, as it must be where H is
    flattest: Tensor  # (B,), smallest pivot
    roughly: bool  # it is enough for the model to be the Hessian in the hull

    def suffices(self, precision: Tensor | float) -> Tensor:
        """Where nothing but the model is needed for this precision, ``(B,)`` bool.

        Where the minimiser is hardly isolated, what points outside the hull add to H may even do harm.
        """
        if self.leading is None:
            return torch.zeros_like(self.exists)
        if self.roughly:
            return self.leading.spanned
        return self.leading.whole & (precision > OUTSIDE)

    def solve(self, right: Tensor) -> Tensor:
        """Solution for the right-hand side ``(B, M, D)``."""
        solution = torch.cholesky_solve(right, self.others)
        if self.leading is None or self.block is None:
            return solution
        across = self.leading.basis.transpose(-1, -2)
        inside = right @ across  # (B, M, K)
        leading = torch.cholesky_solve(inside.flatten(1).unsqueeze(-1), self.block).view_as(inside)
        return torch.baddbmm(solution, leading - solution @ across, self.leading.basis)


class Iterated(NamedTuple):
    """Matrices known by their products, for conjugate gradients."""

    product: Callable[[Tensor], Tensor]  # without the shift
    shift: Tensor  # (B, M, 1)
    model: Model

    def solve(self, right: Tensor, effort: Effort = PRECISE) -> Solved:
        found = conjugate_gradients(
            lambda w: torch.addcmul(self.product(w), self.shift, w),
            torch.where(self.model.exists[:, None, None], right, 0.0),
            self.model.solve,
            effort,
            self.model.suffices(effort.precision),
        )
        return found._replace(definite=found.definite & self.model.exists)


def factorised(matrix: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cholesky factor of ``matrix + shift``, ``(B, M K, M K)``, whether it exists, and its smallest pivot."""
    matrix = matrix.clone()
    matrix.diagonal(dim1=-2, dim2=-1).add_(shift.repeat_interleave(matrix.shape[-1] // shift.shape[-1], -1))
    factor, failed = torch.linalg.cholesky_ex(matrix)
    return factor, failed == 0, factor.diagonal(dim1=-2, dim2=-1).square().amin(-1)


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    right: Tensor,
    precondition: Callable[[Tensor], Tensor],
    effort: Effort = PRECISE,
    known: Tensor | None = None,
) -> Solved:
    """Solution of a batch of symmetric systems.

    Args:
        product: the matrix, ``(B, M, D)`` to ``(B, M, D)``.
        right: ``(B, M, D)``.
        precondition: something like its inverse, positive definite.
        effort: when to stop.
        known: where ``precondition`` is as good as the inverse, ``(B,)`` bool.

    Started at zero, it gives the minimum-norm solution where the matrix is singular.
    """
    precision, rounds, longest, guess = effort
    most = 2 * right[0].numel() if rounds is None else _CG_ROUNDS * rounds
    if isinstance(precision, Tensor):
        precision = precision[:, None, None]
    reach = torch.inf if longest is None else longest.square()[:, None, None]
    solution, residual = torch.zeros_like(right), right
    at_once = direction = precondition(residual)
    strength = _inner(residual, direction)  # (B, 1, 1)
    goal = precision**2 * strength
    sought = goal > 0  # no solution is sought without a right-hand side
    if guess is not None:
        solution, residual = guess, right - product(guess)
        direction = precondition(residual)
        strength = _inner(residual, direction)
    if known is not None:
        solution = torch.where(known[:, None, None], at_once, solution)
        sought = sought & ~known[:, None, None]
    flattest = torch.full_like(strength, torch.inf)
    active = (strength > goal) & sought
    for _ in range(most):
        if rounds is None and not bool(active.any()):
            break
        image = product(direction)
        curvature = _inner(direction, image)
        flattest = torch.where(active, torch.minimum(flattest, curvature / _inner(direction, direction)), flattest)
        length = (strength / curvature).masked_fill_(~(active & (curvature > 0)), 0.0)
        solution = torch.addcmul(solution, length, direction)
        residual = torch.addcmul(residual, length, image, value=-1)
        preconditioned = precondition(residual)
        following = _inner(residual, preconditioned)
        direction = torch.where(active, torch.addcmul(preconditioned, following / strength, direction), direction)
        strength = torch.where(active, following, strength)
        active = active & (strength > goal) & (flattest > 0) & (_inner(solution, solution) <= reach)
    return Solved(solution, *(x.view(-1) for x in (flattest > 0, flattest.clamp_min(0.0), ~active)))


def _inner(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum((-1, -2), keepdim=True)
