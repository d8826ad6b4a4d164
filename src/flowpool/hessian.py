r"""Second derivatives of the energy in X, and linear systems with them (section 8.2 of the paper).

The flow needs :math:`(H + \Lambda)^{-1} r` for its implicit steps, the backward pass :math:`H^{-1} v`. The matrix is
formed and factorised while it is small; beyond that, conjugate gradients use products only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flowpool.divergence import Energy, Evaluation
from flowpool.sinkhorn import schur

DIRECT_LIMIT = 1024  # largest M D for which the Hessian is formed
_CG_TOLERANCE = 1e-10
NULL = 1e-9  # eigenvalues below this, relative to the Hessian's scale 2 a_i, are zero: noise of the inner solves


@dataclass(frozen=True)
class Hessian:
    """The Hessian of a batch of energies at given points.

    Attributes:
        matrix: ``(B, M D, M D)``, or ``None`` where it is too large to form.
        product: maps ``(B, M, D)`` to ``(B, M, D)``.
        unit: typical diagonal, ``(B, M)``; the preconditioner, and the unit of all shifts.
    """

    matrix: Tensor | None
    product: Callable[[Tensor], Tensor]
    unit: Tensor

    def solve(self, right: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Solution of ``(H + shift) w = right`` and whether the matrix is positive definite.

        Args:
            right: ``(B, M, D)``.
            shift: added to the diagonal, per point, ``(B, M)``.
        """
        if self.matrix is None:
            return conjugate_gradients(lambda w: self.product(w) + shift.unsqueeze(-1) * w, right, self.unit + shift)
        diagonal = shift.unsqueeze(-1).expand_as(right).flatten(1)
        factor, failed = torch.linalg.cholesky_ex(self.matrix + torch.diag_embed(diagonal))
        solution = torch.cholesky_solve(right.flatten(1).unsqueeze(-1), factor).squeeze(-1).view_as(right)
        return solution, (failed == 0) & solution.flatten(1).isfinite().all(-1)

    def newton(self, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Newton step ``H^-1 gradient``, whether H is positive semi-definite, and whether it is singular.

        Where the minimiser is not isolated (twin nodes, more points than nodes), H has eigenvalues that are zero up to
        rounding. The gradient has no part along them, so there the step is the minimum-norm one.
        """
        if self.matrix is None:
            step, definite = self.solve(gradient, torch.zeros_like(self.unit))
            return step, definite, torch.zeros_like(definite)
        factor, failed = torch.linalg.cholesky_ex(self.matrix)
        flat = gradient.flatten(1).unsqueeze(-1)
        step = torch.cholesky_solve(flat, factor).squeeze(-1).view_as(gradient)
        pivots = factor.diagonal(dim1=-2, dim2=-1).square().amin(-1)
        sound = (failed == 0) & (pivots > 10 * NULL * self.unit.mean(-1)) & step.flatten(1).isfinite().all(-1)
        if bool(sound.all()):
            return step, sound, ~sound
        _, semi = self.solve(gradient, NULL * self.unit)
        singular = ~sound & semi
        step = torch.where(singular[:, None, None], self.filtered(gradient, torch.zeros_like(pivots), singular), step)
        return step, sound | semi, singular

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


def hessian(energy: Energy, solved: Evaluation) -> Hessian:
    """The Hessian at ``solved.points``, by closed form for the squared Euclidean cost, else by autograd."""
    unit = energy.scales.stiffness
    size = solved.points.shape[1] * solved.points.shape[2]
    if energy.geometry.is_squared_euclidean and size <= DIRECT_LIMIT:
        matrix = squared_euclidean_hessian(energy, solved)
        return Hessian(matrix, _matrix_product(matrix), unit)
    with torch.enable_grad():
        points = solved.points.detach().requires_grad_()
        gradient = energy.gradient(points, solved)

    def product(direction: Tensor) -> Tensor:
        return torch.autograd.grad(gradient, points, direction, retain_graph=True)[0]

    if size > DIRECT_LIMIT:
        return Hessian(None, product, unit)
    return Hessian(dense_by_autograd(gradient, points), product, unit)


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
    identity = torch.eye(num_points, dtype=points.dtype, device=points.device)

    apart = points.unsqueeze(2) - energy.nodes.unsqueeze(1)  # (B, M, N, D)
    weighted = plan.unsqueeze(-1) * apart
    root = energy.masses.sqrt().unsqueeze(1) * conditional
    spread = (root.unsqueeze(-1) * apart).transpose(-1, -2).reshape(batch, size, -1)  # (B, MD, N)
    outer = spread @ spread.transpose(-1, -2)
    drift = weighted.sum(2)  # (B, M, D)
    rows = weighted.transpose(-1, -2).reshape(batch, size, -1) @ conditional.transpose(-1, -2)  # (B, MD, M)
    t = (drift.unsqueeze(-1) * identity[:, None, :]).reshape(batch, size, num_points) - rows
    outer = outer + t @ torch.cholesky_solve(t.transpose(-1, -2), torch.linalg.cholesky_ex(schur(solved.xy))[0])
    blocks = -weighted.transpose(-1, -2) @ apart  # (B, M, D, D), minus beta

    if solved.xx is None:
        base = torch.diag_embed(energy.point_masses)
    else:
        base = solved.xx.plan
        apart = points.unsqueeze(2) - points.unsqueeze(1)  # (B, M, M, D)
        weighted = base.unsqueeze(-1) * apart
        v = (weighted.sum(2).unsqueeze(-1) * identity[:, None, :]) + weighted.transpose(-1, -2)
        v = v.reshape(batch, size, num_points)
        factor = torch.linalg.cholesky_ex(torch.diag_embed(energy.point_masses) + base)[0]
        outer = outer - v @ torch.cholesky_solve(v.transpose(-1, -2), factor)
        blocks = blocks + weighted.transpose(-1, -2) @ apart
        pairs = weighted.unsqueeze(-1) * apart.unsqueeze(-2)  # (B, M, M, D, D)
        outer = outer - pairs.transpose(2, 3).reshape(batch, size, size)

    matrix = (4 / energy.epsilon)[:, None, None] * (outer + _block_diagonal(blocks))
    eye = torch.eye(dim, dtype=points.dtype, device=points.device)
    matrix = matrix + 2 * (base[:, :, None, :, None] * eye[:, None, :]).reshape(batch, size, size)
    return (matrix + matrix.transpose(-1, -2)) / 2


def _block_diagonal(blocks: Tensor) -> Tensor:
    """``(B, M, D, D)`` as the diagonal blocks of ``(B, M D, M D)``."""
    batch, num_points, dim, _ = blocks.shape
    identity = torch.eye(num_points, dtype=blocks.dtype, device=blocks.device)
    return (blocks.unsqueeze(3) * identity[:, None, :, None]).reshape(batch, num_points * dim, num_points * dim)


def _matrix_product(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    def product(direction: Tensor) -> Tensor:
        return (matrix @ direction.flatten(1).unsqueeze(-1)).squeeze(-1).view_as(direction)

    return product


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], right: Tensor, diagonal: Tensor, tolerance: float = _CG_TOLERANCE
) -> tuple[Tensor, Tensor]:
    """Solution of a batch of symmetric systems, and whether no negative curvature was met.

    Args:
        product: the matrix, ``(B, M, D)`` to ``(B, M, D)``.
        right: ``(B, M, D)``.
        diagonal: preconditioner, positive, ``(B, M)``.

    Started at zero, it gives the minimum-norm solution where the matrix is singular.
    """
    scale = diagonal.unsqueeze(-1)
    solution, residual = torch.zeros_like(right), right
    direction = preconditioned = residual / scale
    strength = (residual * preconditioned).sum((-1, -2))
    goal = tolerance**2 * strength
    definite = torch.ones_like(strength, dtype=torch.bool)
    for _ in range(2 * right[0].numel()):
        active = definite & (strength > goal)
        if not bool(active.any()):
            break
        image = product(direction)
        curvature = (direction * image).sum((-1, -2))
        definite = definite & ~(active & (curvature <= 0))
        active = active & definite
        length = torch.where(active, strength / curvature, 0.0)[:, None, None]
        solution = solution + length * direction
        residual = residual - length * image
        preconditioned = residual / scale
        following = (residual * preconditioned).sum((-1, -2))
        ratio = torch.where(active, following / strength, 0.0)[:, None, None]
        direction = torch.where(active[:, None, None], preconditioned + ratio * direction, direction)
        strength = torch.where(active, following, strength)
    return solution, definite
