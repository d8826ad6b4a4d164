r"""Linear systems with the Hessian: implicit steps, Newton steps, and the adjoint of section 8.2 (eqs. 36 to 40).

Curvatures are in units of the stiffness U, ``2 a_i`` for the squared Euclidean cost. With the eigenpairs of
:math:`U^{-1/2} H U^{-1/2} = V \operatorname{diag}(h) V^\top` every system is diagonal, whatever its shift.

Where the minimiser is not isolated (twin nodes, more points than nodes), the Hessian has eigenvalues h that are zero up to
rounding. One rule covers that: solutions carry the Tikhonov filter :math:`h / (h^2 + d^2)`, which is the inverse for
:math:`h \gg d` and leaves flatter directions alone. :data:`~flowpool.core.constants.FLAT` is the d of Newton steps, the root of
the ridge that of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowpool.core.constants import FLAT, LEAST_RIDGE, MOST_CG, SINGULAR
from flowpool.core.divergence import Energy, Evaluation
from flowpool.core.hessian import dense_hessian

Array = Any  # of numbers on the host


class Spectrum(NamedTuple):
    """The Hessian of one cloud, on the host."""

    values: Array  # h, (n,), rising
    basis: Array  # U^-1/2 V, (n, n)

    @property
    def flattest(self) -> float:
        """The smallest curvature."""
        return float(self.values[0])

    def solve(self, right: Array, shift: float, filtered: bool) -> Array:
        """``(H + shift U)^-1 right`` or, filtered, ``H^-1 right`` with d for the shift, ``(M, D)``."""
        values = self.values
        weights = values / (values * values + shift * shift) if filtered else 1 / (values + shift)
        return (self.basis @ (weights * (right.ravel() @ self.basis))).reshape(right.shape)


def spectra(energy: Energy, here: Evaluation, stiffness: Tensor) -> tuple[Tensor, Tensor]:
    """h, ``(B, n)``, rising, and V, ``(B, n, n)``; of a Hessian that is not finite all curvatures are NaN."""
    matrix = dense_hessian(energy, here)
    unit = stiffness.rsqrt().repeat_interleave(here.points.shape[-1], -1)
    return _eigenpairs(matrix * unit.unsqueeze(-1) * unit.unsqueeze(-2))


def _eigenpairs(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Of a matrix that is not finite the eigenvalues are NaN; it harms no other."""
    values, vectors = torch.linalg.eigh(matrix.nan_to_num(0.0, 0.0, 0.0))
    return values + (0 * matrix).sum((-1, -2)).unsqueeze(-1), vectors


def newton_step(energy: Energy, here: Evaluation) -> tuple[Tensor, Tensor]:
    """Length of the filtered Newton step in units of R, and the smallest curvature, both ``(B,)``."""
    scales = energy.scales
    values, vectors = spectra(energy, here, scales.stiffness)
    root = scales.stiffness.sqrt().unsqueeze(-1)
    parts = vectors.mT @ (here.gradient / root).flatten(1).unsqueeze(-1)
    step = vectors @ ((values / (values.square() + FLAT**2)).unsqueeze(-1) * parts)
    return torch.linalg.vector_norm(step.view_as(here.points) / root, dim=(-1, -2)) / scales.radius, values[:, 0]


class Adjoint(NamedTuple):
    """Solution of the linear system of the backward pass.

    Attributes:
        solution: w, ``(B, M, D)``.
        left: ``v - H w``, what flat directions have left of the cotangent, ``(B, M, D)``.
        residual: ``|(H H + lambda) w - H v| / |H v|``, ``(B,)``.
        damped: H has flat directions, so that the ridge decided the answer along them, ``(B,)`` bool.
    """

    solution: Tensor
    left: Tensor
    residual: Tensor
    damped: Tensor


def adjoint(
    energy: Energy, here: Evaluation, cotangent: Tensor, ridge: Tensor, weights: Tensor | None = None
) -> Adjoint:
    r"""The solution of the paper's normal equations :math:`(H H + \lambda) w = H v`.

    Args:
        cotangent: v, ``(B, M, D)``.
        ridge: lambda, in units of the square of the Hessian's scale, ``(B,)``.
        weights: s, ``(D,)``, if the feature d is ``s_d`` times what it is where the equations are meant. They are then
            :math:`(H s^2 H + \lambda s^{-2}) w = H s^2 v`, the same for :math:`s H s`, :math:`w / s` and :math:`s v`.
    """
    scale = cotangent.new_ones(cotangent.shape[1:]) if weights is None else weights.expand(cotangent.shape[1:])
    unit, scale = energy.scales.stiffness.mean(-1), scale.flatten()
    matrix = scale.unsqueeze(-1) * dense_hessian(energy, here) * scale
    right = (scale * cotangent.flatten(1)).unsqueeze(-1)
    penalty = (ridge.clamp_min(LEAST_RIDGE) * unit.square())[:, None]
    values, vectors = _eigenpairs(matrix)
    weighted = (values / (values.square() + penalty)).unsqueeze(-1) * (vectors.mT @ right)
    solution = vectors @ weighted
    image, moved = matrix @ right, matrix @ solution
    rest = matrix @ moved + penalty.unsqueeze(-1) * solution - image
    size = torch.linalg.vector_norm(image, dim=(-1, -2)).clamp_min(torch.finfo(image.dtype).tiny)
    return Adjoint(
        (scale.unsqueeze(-1) * solution).view_as(cotangent),
        ((right - moved) / scale.unsqueeze(-1)).view_as(cotangent),
        torch.linalg.vector_norm(rest, dim=(-1, -2)) / size,
        ~(values[:, 0] > SINGULAR * unit),
    )


class Solve(NamedTuple):
    """A system that a cloud wants to have solved without a spectrum."""

    points: Array  # where the Hessian is taken, as in :class:`flowpool.core.flow.Ask`
    right: Array  # (M, D)
    shift: float
    precision: float  # relative size of the rest
    arrived: bool


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], right: Tensor, unit: Tensor, shift: Tensor, precision: Tensor
) -> tuple[Tensor, Tensor]:
    """Solutions of ``(H + shift U) w = right`` for Hessians that are too large to be formed.

    Args:
        product: H, ``(B, M, D)`` to ``(B, M, D)``.
        unit: U, ``(B, M)``.
        shift, precision: ``(B,)``; the precision is the size of the rest in the metric of U, relative to the right-hand side.

    Returns:
        w, and the smallest curvature of H that was met, in units of U, ``(B,)``: a bound from above of the lowest. Where the
        shifted matrix shows itself to be indefinite the solution stops short.
    """
    wide, shift, precision = unit.unsqueeze(-1), shift[:, None, None], precision[:, None, None]
    rest, solution, flattest = right, torch.zeros_like(right), torch.full_like(shift, torch.inf)
    direction = rest / wide
    strength = _inner(rest, direction)
    goal = precision.square() * strength
    for _ in range(MOST_CG):
        active = strength > goal
        if not bool(active.any()):
            break
        image = product(direction) + shift * wide * direction
        curvature = _inner(direction, image)
        met = curvature / _inner(direction, wide * direction) - shift
        flattest = torch.where(active, torch.minimum(flattest, met), flattest)
        length = torch.where(active & (curvature > 0), strength / curvature, 0.0)
        solution, rest = solution + length * direction, rest - length * image
        following = torch.where(length > 0, _inner(rest, rest / wide), 0.0)
        direction = torch.where(length > 0, rest / wide + following / strength * direction, direction)
        strength = following
    return solution, flattest.flatten()


def _inner(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum((-1, -2), keepdim=True)
