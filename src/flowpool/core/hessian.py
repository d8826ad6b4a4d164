r"""Second derivatives of the energy in X (section 8.2 of the paper).

The flow needs :math:`(H + \Lambda)^{-1} r` for its implicit steps, the backward pass :math:`H^{-1} v`. The matrix is
formed and factorised while it is small; beyond that, :mod:`flowpool.core.systems` has conjugate gradients, which use products
and a model of the matrix in which only the directions that matter are formed. Nothing here but :meth:`Hessian.filtered`
waits for a result on the host unless it is told that it may.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from flowpool.core.divergence import Energy, Evaluation
from flowpool.core.sinkhorn import schur
from flowpool.core.systems import (
    OUTSIDE,
    PRECISE,
    Effort,
    Factorised,
    Iterated,
    Leading,
    Model,
    Solved,
    System,
    factorised,
)

DIRECT_LIMIT = 1024  # largest M D for which the Hessian is formed at all
_WORTH_FORMING = 96  # largest M D for which that is quicker than products in closed form
NULL = 1e-9  # eigenvalues below this, relative to the Hessian's scale 2 a_i, are zero: noise of the inner solves
_FILTER = 1e-7  # the same for a Newton step, which must not take noise for curvature


@dataclass(frozen=True)
class Hessian:
    """The Hessian of a batch of energies at given points.

    Attributes:
        matrix: its lower triangle at least, ``(B, M D, M D)``, or ``None`` where it is not formed.
        product: maps ``(B, M, D)`` to ``(B, M, D)``.
        unit: typical diagonal, ``(B, M)``; the unit of all shifts.
        likeness: acts on every feature much like the Hessian, ``(B, M, M)``.
        leading: its part along the leading directions of the nodes, for the model.
    """

    matrix: Tensor | None
    product: Callable[[Tensor], Tensor]
    unit: Tensor
    likeness: Tensor
    leading: Leading | None = None

    def shifted(self, shift: Tensor, roughly: bool = False) -> System:
        """The matrix ``H + shift``, ready to be solved with.

        Args:
            shift: per point, ``(B, M)``.
            roughly: a rough solution is enough, and has to be that of the compiled engine.
        """
        if self.matrix is None or (roughly and self.leading is not None):
            return Iterated(self.product, shift.unsqueeze(-1), self._model(shift, roughly))
        return Factorised(*factorised(self.matrix, shift))

    def _model(self, shift: Tensor, roughly: bool) -> Model:
        # The ridge keeps the model definite where two points have met, or where H is singular.
        ridge = shift + NULL * self.unit
        others, exists, flattest = factorised(self.likeness, ridge)
        if self.leading is None:
            return Model(others, None, None, exists, flattest, roughly)
        block, block_exists, block_flattest = factorised(self.leading.matrix, ridge)
        flattest = torch.minimum(flattest, block_flattest)
        return Model(others, block, self.leading, exists & block_exists, flattest, roughly)

    @cached_property
    def plain(self) -> System:
        """H itself."""
        return self.shifted(torch.zeros_like(self.unit))

    @cached_property
    def _damped(self) -> System:
        return self.shifted(_FILTER * self.unit)

    def newton(self, gradient: Tensor, effort: Effort = PRECISE) -> Solved:
        """Newton step ``H^-1 gradient``; ``definite`` where H is positive semi-definite.

        Where the minimiser is not isolated (twin nodes, more points than nodes), H has eigenvalues that are zero up to
        rounding, and :meth:`is_singular` holds. The gradient has no part along them, so there the step is the
        minimum-norm one. Conjugate gradients, which start at zero, find no other.
        """
        found = self.plain.solve(gradient, effort)
        if isinstance(self.plain, Iterated):
            model, step = self.plain.model, found.solution
            known = model.suffices(effort.precision)
            if effort.rounds is not None or bool(known.any()):
                # The model's ridge makes of noise along the zero something large; a second solution takes it out again.
                excess = model.solve(NULL * self.unit.unsqueeze(-1) * step)
                step = torch.where(known[:, None, None], step - excess, step)
            return found._replace(solution=step, flattest=torch.minimum(found.flattest, model.flattest))
        doubtful = self.is_singular(found) | ~found.definite
        if effort.rounds is None and not bool(doubtful.any()):
            return found
        # H (H + shift)^-1 = 1 - shift (H + shift)^-1 takes out what is zero, and hardly touches anything else.
        rest = gradient
        for _ in range(2):
            rest = rest - _FILTER * self.unit.unsqueeze(-1) * self._damped.solve(rest).solution
        filtered = self._damped.solve(rest)
        step = torch.where(doubtful[:, None, None], filtered.solution, found.solution)
        return Solved(step, ~doubtful | filtered.definite, found.flattest, found.settled)

    def is_singular(self, found: Solved) -> Tensor:
        """Whether a solution met an eigenvalue of zero, ``(B,)`` bool."""
        return found.flattest <= 10 * NULL * self.unit.mean(-1)

    def filtered(self, right: Tensor, penalty: Tensor, chosen: Tensor) -> Tensor:
        """``H (H H + penalty)^-1 right`` by eigendecomposition, zero along the null space, for the chosen clouds."""
        assert self.matrix is not None  # noqa: S101 - callers have formed it
        solution = torch.zeros_like(right)
        # One at a time: LAPACK's result for a matrix in a batch depends on where in memory it lies.
        for graph in chosen.nonzero().squeeze(-1).tolist():
            matrix = self.matrix[graph].clone()
            if not bool(matrix.isfinite().all()):
                solution[graph] = torch.nan
                continue
            values, vectors = torch.linalg.eigh(matrix)
            safe = torch.where(values.abs() > NULL * self.unit[graph].mean(), values, torch.inf)
            weights = 1 / (safe + penalty[graph] / safe)
            solution[graph] = (vectors @ (weights * (vectors.T @ right[graph].flatten()))).view_as(right[graph])
        return solution


def hessian(energy: Energy, solved: Evaluation, form: bool = False) -> Hessian:
    """The Hessian at ``solved.points``, by closed form for the squared Euclidean cost, else by autograd.

    Args:
        form: form the matrix also where conjugate gradients would be quicker.
    """
    unit = energy.scales.stiffness
    size = solved.points.shape[1] * solved.points.shape[2]
    if energy.geometry.is_squared_euclidean:
        likeness = torch.diag_embed(unit) if solved.xx is None else 2 * solved.xx.plan
        if size <= min(DIRECT_LIMIT, DIRECT_LIMIT if form else _WORTH_FORMING):
            matrix = squared_euclidean_hessian(energy, solved)
            leading = None if form else leading_hessian(energy, solved)
            return Hessian(matrix, _matrix_product(matrix), unit, likeness, leading)
        product = PlanResponse(energy, solved).hessian_product
        return Hessian(None, product, unit, likeness, leading_hessian(energy, solved))
    with torch.enable_grad():
        points = solved.points.detach().requires_grad_()
        gradient = energy.gradient(points, solved)

    def product_by_autograd(direction: Tensor) -> Tensor:
        return torch.autograd.grad(gradient, points, direction, retain_graph=True)[0]

    whole = dense_by_autograd(gradient, points) if size <= DIRECT_LIMIT else None
    return Hessian(whole, product_by_autograd, unit, torch.diag_embed(unit))


def dense_by_autograd(gradient: Tensor, points: Tensor) -> Tensor:
    """Jacobian of a gradient ``(B, M, D)`` in the points of the same graph, ``(B, M D, M D)``."""
    batch, num_points, dim = points.shape
    size = num_points * dim
    basis = torch.eye(size, dtype=points.dtype, device=points.device).view(size, 1, num_points, dim)
    rows = torch.autograd.grad(
        gradient, points, basis.expand(size, batch, num_points, dim), retain_graph=True, is_grads_batched=True
    )[0]
    matrix = rows.transpose(0, 1).reshape(batch, size, size)
    return (matrix + matrix.transpose(-1, -2)) / 2


def squared_euclidean_hessian(energy: Energy, solved: Evaluation) -> Tensor:
    r"""The Hessian for :math:`C = |x - y|^2` from the plans, ``(B, M D, M D)``.

    With :math:`U_{ij} = x_i - y_j`, :math:`u_{ik} = x_i - x_k`, :math:`S = \operatorname{diag}(a) - P A^\top`:

    .. math::
        H = 2 Q \otimes I + \tfrac4\varepsilon \bigl( B B^\top + t S^{-1} t^\top
            - v (\operatorname{diag}(a) + Q)^{-1} v^\top
            - \operatorname{blockdiag}(\beta_i - \gamma_i) - [Q_{il} u_{il} u_{il}^\top]_{il} \bigr)

    where :math:`B_{(ie),j} = \sqrt{b_j} A_{ij} U_{ij,e}`,
    :math:`t_{(ie),m} = \sum_j P_{ij} ([i=m] - A_{mj}) U_{ij,e}`,
    :math:`v_{(ie),k} = [i=k] \sum_l Q_{il} u_{il,e} + Q_{ik} u_{ik,e}`,
    :math:`\beta_i = \sum_j P_{ij} U_{ij} U_{ij}^\top` and :math:`\gamma_i = \sum_k Q_{ik} u_{ik} u_{ik}^\top`.
    Without debiasing Q is replaced by diag(a) in the first term and all other terms with Q fall away.
    """
    points, plan, conditional = solved.points, solved.xy.plan, solved.xy.conditional
    batch, num_points, dim = points.shape
    size = num_points * dim
    sharpness = (4 / energy.epsilon)[:, None, None]

    apart = (points.unsqueeze(-1) - energy.nodes.transpose(-1, -2).unsqueeze(1)).contiguous()  # (B, M, D, N), U
    weighted = plan.unsqueeze(-2) * apart
    spread = ((energy.masses.sqrt().unsqueeze(1) * conditional).unsqueeze(-2) * apart).view(batch, size, -1)
    t = -weighted.view(batch, size, -1) @ conditional.transpose(-1, -2)  # (B, MD, M)
    _own(t, num_points).add_(weighted.sum(-1))
    response = _solve(schur(plan, conditional), t)
    blocks = -weighted @ apart.transpose(-1, -2)  # (B, M, D, D), minus beta
    if solved.xx is None:
        base = torch.diag_embed(energy.point_masses)
        matrix = points.new_zeros(batch, num_points, dim, num_points, dim)
        left, right = torch.cat([spread, t], -1), torch.cat([spread, response], -1)
    else:
        base = solved.xx.plan
        apart = (points.unsqueeze(-1) - points.transpose(-1, -2).unsqueeze(1)).contiguous()  # (B, M, D, M), u
        weighted = base.unsqueeze(-2) * apart
        v = weighted.view(batch, size, num_points).clone()
        _own(v, num_points).add_(weighted.sum(-1))
        left = torch.cat([spread, t, v], -1)
        right = torch.cat([spread, response, -_solve(torch.diag_embed(energy.point_masses) + base, v)], -1)
        blocks += weighted @ apart.transpose(-1, -2)
        weighted = -sharpness.unsqueeze(-1) * weighted
        matrix = (weighted.unsqueeze(-1) * apart.transpose(-1, -2).unsqueeze(2)).contiguous()  # (B, M, D, M, D)
    matrix.view(batch, size, size).baddbmm_(sharpness * left, right.transpose(-1, -2))
    matrix.diagonal(dim1=1, dim2=3).add_((sharpness.unsqueeze(-1) * blocks).permute(0, 2, 3, 1))
    matrix.diagonal(dim1=2, dim2=4).add_(2 * base.unsqueeze(-1))
    return matrix.view(batch, size, size)


def leading_hessian(energy: Energy, solved: Evaluation) -> Leading:
    """The Hessian for ``|x - y|^2`` in the leading directions: that of the projected clouds with the plans at hand."""
    basis, spanned = energy.leading
    across = basis.transpose(-1, -2)
    projected = replace(energy, nodes=energy.nodes @ across)
    matrix = squared_euclidean_hessian(projected, solved._replace(points=solved.points @ across))
    centred = solved.points - energy.scales.centre
    outside = (centred - centred @ across @ basis).square().sum(-1).amax(-1).sqrt()
    return Leading(basis, matrix, spanned, spanned & (outside <= OUTSIDE * energy.epsilon / energy.scales.radius))


def _own(rows: Tensor, num_points: int) -> Tensor:
    """Of ``(B, M D, M)`` the view ``(B, M, D)`` of the entries that belong to the same point."""
    return rows.view(rows.shape[0], num_points, -1, num_points).diagonal(dim1=1, dim2=3).transpose(-1, -2)


def _solve(matrix: Tensor, rows: Tensor) -> Tensor:
    """``rows matrix^-1`` for a symmetric positive definite matrix."""
    return torch.cholesky_solve(rows.transpose(-1, -2), torch.linalg.cholesky_ex(matrix)[0]).transpose(-1, -2)


def _matrix_product(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    def product(direction: Tensor) -> Tensor:
        return (matrix @ direction.flatten(1).unsqueeze(-1)).squeeze(-1).view_as(direction)

    return product


class PlanChange(NamedTuple):
    """Derivatives of both plans along a direction of the points."""

    plan: Tensor  # (B, M, N), dP
    dual: Tensor  # (B, N), dg
    self_plan: Tensor | None  # (B, M, M), dQ


class PlanResponse:
    r"""How the plans of the squared Euclidean cost answer when the points move along w.

    .. math::
        \dot P = P \odot (\dot f_i + \dot g_j - 2 \langle w_i, x_i - y_j\rangle) / \varepsilon, \quad
        \dot Q = Q \odot (\dot h_i + \dot h_k - 2 \langle w_i - w_k, x_i - x_k\rangle) / \varepsilon

    where the potentials follow so that all marginals stay.
    """

    def __init__(self, energy: Energy, solved: Evaluation) -> None:
        self.energy, self.solved = energy, solved
        self.factor, _ = torch.linalg.cholesky_ex(schur(solved.xy.plan, solved.xy.conditional))
        self.self_factor = None
        if solved.xx is not None:
            self.self_factor, _ = torch.linalg.cholesky_ex(torch.diag_embed(energy.point_masses) + solved.xx.plan)

    def along(self, direction: Tensor) -> PlanChange:
        """The derivatives along w, ``(B, M, D)``."""
        points, epsilon = self.solved.points, self.energy.epsilon[:, None, None]
        plan, conditional, xx = self.solved.xy.plan, self.solved.xy.conditional, self.solved.xx
        own = (direction * points).sum(-1, keepdim=True)  # (B, M, 1)
        change = torch.baddbmm(own, direction, self.energy.nodes.transpose(-1, -2), beta=2, alpha=-2)  # (B, M, N), dC
        column = (conditional * change).sum(-2, keepdim=True)  # (B, 1, N)
        change = change - column
        first = torch.cholesky_solve((plan * change).sum(-1, keepdim=True), self.factor)  # (B, M, 1), df
        shift = (conditional * first).sum(-2, keepdim=True)
        plan_change = plan * (first - shift - change) / epsilon
        dual = (column - shift).squeeze(-2)
        if xx is None or self.self_factor is None:
            return PlanChange(plan_change, dual, None)
        cross = torch.baddbmm(own, direction, points.transpose(-1, -2), beta=2, alpha=-2)
        change = cross + cross.transpose(-1, -2)  # (B, M, M), dD
        first = torch.cholesky_solve((xx.plan * change).sum(-1, keepdim=True), self.self_factor)  # (B, M, 1), dh
        return PlanChange(plan_change, dual, xx.plan * (first + first.transpose(-1, -2) - change) / epsilon)

    def hessian_product(self, direction: Tensor) -> Tensor:
        """``H w = 2 (Q w + dQ X - dP Y)``, with diag(a) for Q where the energy is not debiased."""
        change = self.along(direction)
        if self.solved.xx is None or change.self_plan is None:
            own = self.energy.point_masses.unsqueeze(-1) * direction
        else:
            own = torch.bmm(self.solved.xx.plan, direction).baddbmm_(change.self_plan, self.solved.points)
        return own.baddbmm_(change.plan, self.energy.nodes, beta=2, alpha=-2)
