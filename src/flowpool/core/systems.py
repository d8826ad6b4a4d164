r"""Linear systems with the Hessian: implicit steps, Newton steps, and the adjoint of section 8.2 (eqs. 36 to 40).

The model of the Hessian is a dense block for the leading directions E of the nodes, and 2 Q for each of the others:

.. math:: H \approx E^\top H_{EE} E + 2 Q \otimes (I - E^\top E)

It is exact for directions outside the hull of the nodes once the points lie in it, and close for directions along which the
nodes vary by little against epsilon. Where it is exact its factor gives the solution; elsewhere it preconditions conjugate
gradients.

Where the minimiser is not isolated (twin nodes, more points than nodes), the Hessian has eigenvalues h that are zero up to
rounding. One rule covers that: solutions carry the Tikhonov filter :math:`h / (h^2 + d^2)`, which is the inverse for
:math:`h \gg d` and leaves flatter directions alone. :data:`~flowpool.core.constants.FLAT` is the d of Newton steps, the ridge
that of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flowpool.core import definite
from flowpool.core.constants import (
    ADJOINT,
    FLAT,
    INVERSIONS,
    LEAST_RIDGE,
    LEAST_SHIFT,
    MET,
    MOST_CG,
    PRECISE,
    ROUGH,
    SINGULAR,
)
from flowpool.core.hessian import Curvature
from flowpool.core.sinkhorn import looks_every

Product = Callable[[Tensor], Tensor]


class Model(NamedTuple):
    """The model of the Hessian with a shift, ready to be solved with."""

    others: Tensor  # (B, M, M), factor
    block: Tensor | None  # (B, M K, M K), factor
    basis: Tensor | None  # (B, K, D)
    exists: Tensor  # (B,) bool, it is positive definite
    scale: Tensor  # (B,), of the Hessian
    shift: Tensor  # (B,), in units of it
    beside: bool = False  # there are features beside the basis

    def solve(self, right: Tensor) -> Tensor:
        """Solution for the right-hand side ``(B, M, D)``."""
        if self.block is not None and self.basis is None:
            return definite.solve(self.block, right.view(len(right), -1, 1)).view_as(right)
        solution = definite.solve(self.others, right)
        if self.block is None or self.basis is None:
            return solution
        across = self.basis.mT
        inside = torch.bmm(right, across)  # (B, M, K)
        leading = definite.solve(self.block, inside.view(len(right), -1, 1)).view_as(inside)
        return torch.baddbmm(solution, leading.baddbmm(solution, across, alpha=-1), self.basis)

    def smallest_pivot(self) -> Tensor:
        """A bound from above of the smallest curvature with the shift, ``(B,)``, that costs nothing."""
        return _pivots(self.others if self.block is None else self.block).amin(-1) / self.scale

    def smallest_curvature(self) -> Tensor:
        """The smallest curvature without the shift, ``(B,)``; zero where the model does not exist."""
        found = _smallest_eigenvalue(self.others if self.block is None else self.block)
        if self.beside:
            found = torch.minimum(found, _smallest_eigenvalue(self.others))
        return torch.where(self.exists, found / self.scale - self.shift, 0.0)


def _pivots(factor: Tensor) -> Tensor:
    return factor.diagonal(dim1=-2, dim2=-1).square()


def _smallest_eigenvalue(factor: Tensor) -> Tensor:
    """That of a matrix with a Cholesky factor, ``(B,)``, by inverse iteration from the coordinate with the smallest pivot.

    A bound from above that is never worse than the pivot.
    """
    least = _pivots(factor).argmin(-1, keepdim=True)  # (B, 1)
    vector = (torch.arange(factor.shape[-1], device=factor.device) == least).to(factor.dtype).unsqueeze(-1)
    for _ in range(INVERSIONS):
        vector = definite.solve(factor, vector / _length(vector)[:, None, None])
    return 1 / _length(vector)


def shifted_model(curvature: Curvature, shift: Tensor) -> Model:
    """The model of ``H + shift``, the shift in units of the Hessian's scale, ``(B,)``."""
    unit, scale = curvature.unit, curvature.unit.mean(-1)
    others, exists = _factorised(curvature.likeness, (shift + MET).unsqueeze(-1) * unit)
    if curvature.block is None:
        return Model(others, None, None, exists, scale, shift)
    block, block_exists = _factorised(curvature.block, shift.unsqueeze(-1) * unit)
    exists = block_exists if curvature.basis is None else exists & block_exists
    return Model(others, block, curvature.basis, exists, scale, shift, curvature.others)


def _factorised(matrix: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Cholesky factor of ``matrix + shift``, ``(B, M K, M K)``, and whether it exists."""
    matrix = matrix.clone()
    matrix.diagonal(dim1=-2, dim2=-1).view(*shift.shape, -1).add_(shift.unsqueeze(-1))
    factor, exists = definite.factor(matrix)
    finite = _pivots(factor).amin(-1) < torch.inf  # a square: not finite is infinite or NaN
    return factor, exists & finite


class Solved(NamedTuple):
    """Solution of a batch of symmetric linear systems.

    Attributes:
        solution: ``(B, M, D)``.
        flattest: smallest curvature met, of the shifted Hessian, in units of its scale, ``(B,)``: a bound from above of the
            lowest, and not above zero where that is not definite.
    """

    solution: Tensor
    flattest: Tensor


def conjugate_gradients(
    product: Product,
    right: Tensor,
    model: Model,
    unit: Tensor,
    shift: Tensor,
    precision: Tensor | float,
    longest: Tensor | None = None,
    guess: Tensor | None = None,
    least: float = 0.0,
) -> Solved:
    """Solutions of ``(H + shift unit) w = right``.

    Args:
        product: H, ``(B, M, D)`` to ``(B, M, D)``.
        right: ``(B, M, D)``.
        model: something like the matrix; a system whose model does not exist is left at zero.
        unit: ``(B, M)``.
        shift: ``(B,)``.
        precision: relative size of the rest, in the metric of the model, at which to stop; may differ, ``(B,)``.
        longest: length of the solution at which to stop, ``(B,)``.
        guess: where to start, ``(B, M, D)``; ``None``: at zero.
        least: curvature at or below which to stop: the matrix is not definite enough.
    """
    wide = unit.unsqueeze(-1)
    offset = shift[:, None, None] * wide
    if isinstance(precision, Tensor):
        precision = precision[:, None, None]
    reach = torch.inf if longest is None else longest.square()[:, None, None]
    exists = model.exists[:, None, None]
    rest, solution = torch.where(exists, right, 0.0), torch.zeros_like(right)
    direction = torch.where(exists, model.solve(rest), 0.0)
    strength = _inner(rest, direction)  # (B, 1, 1)
    goal = precision**2 * strength
    active = goal > 0
    if guess is not None:
        solution = torch.where(exists, guess, 0.0)
        rest = rest - torch.where(exists, product(solution) + offset * solution, 0.0)
        direction = torch.where(exists, model.solve(rest), 0.0)
        strength = _inner(rest, direction)
    active = active & (strength > goal)
    flattest = torch.full_like(strength, torch.inf)
    between = looks_every(right.device)
    for iteration in range(MOST_CG):
        if iteration % between == 0 and not bool(active.any()):
            break
        image = torch.addcmul(product(direction), offset, direction)
        curvature = _inner(direction, image)
        flattest = torch.where(
            active, torch.minimum(flattest, curvature / _inner(direction, wide * direction)), flattest
        )
        active = active & (flattest > least)
        length = torch.where(active, strength / curvature, 0.0)
        solution = torch.addcmul(solution, length, direction)
        rest = torch.addcmul(rest, length, image, value=-1)
        ready = model.solve(rest)
        following = _inner(rest, ready)
        direction = torch.where(active, torch.addcmul(ready, following / strength, direction), direction)
        strength = torch.where(active, following, strength)
        active = active & (strength > goal) & (_inner(solution, solution) <= reach)
    return Solved(solution, flattest.view(-1))


class System(NamedTuple):
    """The Hessian of a batch of energies at some points."""

    curvature: Curvature
    product: Product

    def solve(
        self,
        right: Tensor,
        shift: Tensor,
        known: Tensor,
        filtered: Tensor | None = None,
        iterate: bool = True,
        precision: Tensor | float = ROUGH,
        longest: Tensor | None = None,
        guess: Tensor | None = None,
    ) -> Solved:
        r"""``(H + shift)^-1 right``: by the model where that is taken for the Hessian, by conjugate gradients elsewhere.

        The filter of Newton steps: with :math:`t = (H + D)^{-1}`, D being d times the Hessian's scale, and
        :math:`y = t r - t D t r`, it is :math:`y + 2 t D y - 2 t D t D y` up to :math:`(2 d / h)^2`, and smaller than it should
        be for flatter directions. Where the model is not the Hessian, :math:`t r` alone is as good as what is asked of
        conjugate gradients.

        Args:
            shift: in units of the Hessian's scale, ``(B,)``.
            known: the model will do, ``(B,)`` bool: it is the Hessian, or close enough.
            filtered: which solutions are Newton steps, whose shift is FLAT, ``(B,)`` bool; ``None``: none.
            iterate: solve by conjugate gradients what is not known, or leave it for another time.
            precision, longest, guess: see :func:`conjugate_gradients`.
        """
        model, unit = shifted_model(self.curvature, shift), self.curvature.unit
        exists, trusted = model.exists[:, None, None], known[:, None, None]
        solution, flattest = torch.where(exists, model.solve(right), 0.0), model.smallest_pivot()
        if iterate:
            asked = torch.where(trusted, 0.0, right)
            found = conjugate_gradients(self.product, asked, model, unit, shift, precision, longest, guess)
            solution = torch.where(trusted, solution, found.solution)
            flattest = torch.where(known, flattest, torch.minimum(flattest, found.flattest))
        if filtered is not None:
            flat = FLAT * unit.unsqueeze(-1)
            once = solution - model.solve(flat * solution)
            twice = model.solve(flat * once)
            chosen = exists & (filtered & known)[:, None, None]
            solution = torch.where(chosen, once + 2 * (twice - model.solve(flat * twice)), solution)
        return Solved(solution, torch.where(model.exists, flattest, -torch.inf))

    def newton(self, right: Tensor, precision: float) -> Solved:
        """Filtered ``H^-1 right``, and the smallest curvature met of H itself, below ``-FLAT`` where that is not definite."""
        shift, known = torch.full_like(self.curvature.unit[:, 0], FLAT), self.curvature.exact
        found = self.solve(right, shift, known, torch.ones_like(known), not bool(known.all()), precision)
        return found._replace(flattest=found.flattest - FLAT)

    def adjoint(self, cotangent: Tensor, ridge: Tensor, weights: Tensor | None = None) -> Adjoint:
        r"""The solution of the paper's normal equations :math:`(H H + \lambda) w = H v`.

        They are definite for any H, and solved by conjugate gradients with the squared inverse of the model, from the
        solution of :math:`H w = v`, which is theirs but for :math:`\lambda / h^2` where H has no flat direction; else from
        a damped one.

        Args:
            cotangent: v, ``(B, M, D)``.
            ridge: lambda, in units of the square of the Hessian's scale, ``(B,)``.
            weights: s, ``(D,)``, if the feature d is ``s_d`` times what it is where the equations are meant. They are then
                :math:`(H s^2 H + \lambda s^{-2}) w = H s^2 v`.
        """
        curvature, unit = self.curvature, self.curvature.unit
        squares = cotangent.new_ones(()) if weights is None else weights.square()
        penalty = (ridge.clamp_min(LEAST_RIDGE) * unit.mean(-1).square())[:, None, None] / squares
        shift = ridge.sqrt().clamp_min(LEAST_SHIFT)
        model = shifted_model(curvature, shift)
        for _ in range(12):  # H may be indefinite where the flow was cut off; any definite model will do
            if bool(model.exists.all()):
                break
            shift = torch.where(model.exists, shift, 10 * shift)
            model = shifted_model(curvature, shift)
        straight = conjugate_gradients(
            self.product, cotangent, model, unit, torch.zeros_like(shift), PRECISE, least=SINGULAR
        )
        sound, solution = straight.flattest > SINGULAR, straight.solution
        if not bool(sound.all()):
            damped = conjugate_gradients(self.product, cotangent, model, unit, shift, ROUGH)
            solution = torch.where(sound[:, None, None], solution, damped.solution)

        def normal(value: Tensor) -> Tensor:
            return self.product(squares * self.product(value)) + penalty * value

        image = self.product(squares * cotangent)
        goal = ADJOINT**2 * _inner(*[model.solve(image)] * 2)
        rest = image - normal(solution)
        half = model.solve(rest)
        direction, strength = model.solve(half), _inner(half, half)
        active = (strength > goal) & model.exists[:, None, None]
        between = looks_every(image.device)
        for iteration in range(MOST_CG):
            if iteration % between == 0 and not bool(active.any()):
                break
            moved = normal(direction)
            length = torch.where(active, strength / _inner(direction, moved), 0.0)
            solution = torch.addcmul(solution, length, direction)
            rest = torch.addcmul(rest, length, moved, value=-1)
            half = model.solve(rest)
            following = _inner(half, half)
            direction = torch.where(
                active, torch.addcmul(model.solve(half), following / strength, direction), direction
            )
            strength = torch.where(active, following, strength)
            active = active & (strength > goal)
        solution = torch.where(model.exists[:, None, None], solution, torch.nan)
        tiny = torch.finfo(image.dtype).tiny
        residual = _length(image - normal(solution)) / _length(image).clamp_min(tiny)
        flattest = torch.minimum(straight.flattest, model.smallest_curvature())
        left = cotangent - self.product(solution)
        return Adjoint(solution, left, residual, ~(flattest > SINGULAR))


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


def _inner(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum((-1, -2), keepdim=True)


def _length(value: Tensor) -> Tensor:
    return value.square().sum((-1, -2)).sqrt()
