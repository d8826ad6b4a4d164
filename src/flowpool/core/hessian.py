r"""Second derivatives of the energy in X (sections 8 and 8.2 of the paper, eqs. 25 and 35).

:class:`Curvature` is what is kept of the Hessian of a batch of energies, and :func:`hessian_product` its product with a
direction. For the squared Euclidean cost both are in closed form, and only the part along the leading directions of the nodes
is formed: it is all of the Hessian that is not known at once (:mod:`flowpool.core.systems`). For other costs it is formed by
autograd while it is small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flowpool.core import definite
from flowpool.core.constants import OUTSIDE
from flowpool.core.divergence import Energy, Evaluation
from flowpool.core.sinkhorn import schur

MOST_FORMED = 96  # largest M D for which the Hessian of any other cost is formed


class Curvature(NamedTuple):
    """What is known of the Hessian of a batch of energies at some points.

    Attributes:
        block: its part along some directions, ``(B, M K, M K)``, its lower triangle at least; ``None``: nothing is formed.
        basis: these directions, ``(B, K, D)``, orthonormal, or zero where a cloud has fewer; ``None``: all of them.
        likeness: acts on every other feature much like the Hessian, ``(B, M, M)``.
        spanned: along all other directions of the hull of the nodes there is nothing, ``(B,)`` bool.
        exact: and the points lie in it, so that this is all of the Hessian, ``(B,)`` bool.
        unit: typical diagonal, ``(B, M)``; the unit of curvatures and shifts.
        others: there are features beside the basis.
    """

    block: Tensor | None
    basis: Tensor | None
    likeness: Tensor
    spanned: Tensor
    exact: Tensor
    unit: Tensor
    others: bool = False


def curvature(energy: Energy, here: Evaluation) -> Curvature:
    """The Hessian at ``here.points``, as far as it is worth forming."""
    unit = energy.scales.stiffness
    everywhere = torch.ones_like(energy.epsilon, dtype=torch.bool)
    if energy.geometry.is_squared_euclidean:
        likeness = torch.diag_embed(unit) if here.xx is None else 2 * here.xx.plan
        basis, spanned = energy.leading
        points = torch.bmm(here.points, basis.mT)  # along the leading directions
        block = _squared_euclidean_hessian(points, energy.coordinates, energy, here)
        centred = here.points - energy.scales.centre
        outside = torch.linalg.vector_norm(centred - torch.bmm(centred, basis.mT) @ basis, dim=-1).amax(-1)
        exact = spanned & (outside <= OUTSIDE * energy.epsilon / energy.scales.radius)
        features = energy.features or basis.shape[-1]
        return Curvature(block, basis, likeness, spanned, exact, unit, basis.shape[1] < features)
    likeness = torch.diag_embed(unit)
    if here.points[0].numel() > MOST_FORMED:
        return Curvature(None, None, likeness, ~everywhere, ~everywhere, unit)
    gradient, points = _differentiable_gradient(energy, here)
    return Curvature(dense_by_autograd(gradient, points), None, likeness, everywhere, everywhere, unit)


def dense_hessian(energy: Energy, here: Evaluation) -> Tensor:
    """The whole Hessian, ``(B, M D, M D)``."""
    if energy.geometry.is_squared_euclidean:
        return squared_euclidean_hessian(energy, here)
    return dense_by_autograd(*_differentiable_gradient(energy, here))


def hessian_product(energy: Energy, here: Evaluation) -> Callable[[Tensor], Tensor]:
    """The function ``W -> H W`` on ``(B, M, D)``; what it needs is computed when it is first called."""
    made: list[Callable[[Tensor], Tensor]] = []

    def product(direction: Tensor) -> Tensor:
        if not made:
            made.append(_make_product(energy, here))
        return made[0](direction)

    return product


def _make_product(energy: Energy, here: Evaluation) -> Callable[[Tensor], Tensor]:
    if energy.geometry.is_squared_euclidean:
        return PlanResponse(energy, here).hessian_product
    gradient, points = _differentiable_gradient(energy, here)
    return lambda direction: torch.autograd.grad(gradient, points, direction, retain_graph=True)[0]


def _differentiable_gradient(energy: Energy, here: Evaluation) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        points = here.points.detach().requires_grad_()
        return energy.gradient(points, here), points


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
    return _squared_euclidean_hessian(solved.points, energy.nodes.mT, energy, solved)


def _squared_euclidean_hessian(points: Tensor, nodes: Tensor, energy: Energy, solved: Evaluation) -> Tensor:
    """:func:`squared_euclidean_hessian` for some coordinates of the points, ``(B, M, D)``, and of the nodes, ``(B, D, N)``."""
    plan, conditional = solved.xy.plan, solved.xy.conditional
    batch, num_points, dim = points.shape
    size = num_points * dim
    column = points.unsqueeze(-1)
    apart = (column - nodes.unsqueeze(1)).contiguous()  # (B, M, D, N), U
    weighted = plan.unsqueeze(-2) * apart
    flat, wide = weighted.view(batch, size, -1), (conditional.unsqueeze(-2) * apart).view(batch, size, -1)
    t = torch.bmm(flat, conditional.mT)  # (B, MD, M), minus t
    _own(t, num_points).sub_(weighted.sum(-1))
    if solved.xx is None:
        base = torch.diag_embed(energy.point_masses)
        matrix, rest = points.new_zeros(batch, size, size), points.new_zeros(())
        response, nothing = definite.solve(definite.factor(schur(plan, conditional))[0], t.mT), torch.zeros_like(t)
        left, right = torch.cat([flat, t, nothing], -1), torch.cat([wide, response.mT, nothing], -1)
    else:
        base = solved.xx.plan
        self_apart = (column - points.mT.unsqueeze(1)).contiguous()  # (B, M, D, M), u
        self_weighted = base.unsqueeze(-2) * self_apart
        v = self_weighted.view(batch, size, num_points).clone()
        _own(v, num_points).add_(self_weighted.sum(-1))
        systems = torch.stack([schur(plan, conditional), base])
        systems[1].diagonal(dim1=-2, dim2=-1).add_(energy.point_masses)
        response = definite.solve(definite.factor(systems)[0], torch.stack([t, v]).mT)  # (2, B, M, MD)
        left, right = torch.cat([flat, t, v], -1), torch.cat([wide, response[0].mT, -response[1].mT], -1)
        pairs = self_weighted.unsqueeze(-1) * self_apart.mT.unsqueeze(2)  # (B, M, D, M, D)
        matrix, rest = pairs.reshape(batch, size, size), pairs.sum(3)  # (B, M, D, D), gamma
    matrix = torch.baddbmm(matrix, left, right.mT, beta=-1)
    blocks = rest - torch.matmul(weighted, apart.mT)
    square = matrix.view(batch, num_points, dim, num_points, dim)
    square.diagonal(dim1=1, dim2=3).add_(blocks.permute(0, 2, 3, 1))
    matrix *= (4 / energy.epsilon)[:, None, None]
    square.diagonal(dim1=2, dim2=4).add_(base.unsqueeze(-1), alpha=2)
    return matrix


def _own(rows: Tensor, num_points: int) -> Tensor:
    """Of ``(B, M D, M)`` the view ``(B, M, D)`` of the entries that belong to the same point."""
    return rows.view(rows.shape[0], num_points, -1, num_points).diagonal(dim1=1, dim2=3).mT


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
        self.factor, _ = definite.factor(schur(solved.xy.plan, solved.xy.conditional))
        self.self_factor = None
        if solved.xx is not None:
            self.self_factor, _ = definite.factor(torch.diag_embed(energy.point_masses) + solved.xx.plan)

    def along(self, direction: Tensor) -> PlanChange:
        """The derivatives along w, ``(B, M, D)``."""
        points, epsilon = self.solved.points, self.energy.epsilon[:, None, None]
        plan, conditional, xx = self.solved.xy.plan, self.solved.xy.conditional, self.solved.xx
        own = (direction * points).sum(-1, keepdim=True)  # (B, M, 1)
        change = torch.baddbmm(own, direction, self.energy.nodes.transpose(-1, -2), beta=2, alpha=-2)  # (B, M, N), dC
        column = (conditional * change).sum(-2, keepdim=True)  # (B, 1, N)
        change = change - column
        first = definite.solve(self.factor, (plan * change).sum(-1, keepdim=True))  # (B, M, 1), df
        shift = (conditional * first).sum(-2, keepdim=True)
        plan_change = plan * (first - shift - change) / epsilon
        dual = (column - shift).squeeze(-2)
        if xx is None or self.self_factor is None:
            return PlanChange(plan_change, dual, None)
        cross = torch.baddbmm(own, direction, points.transpose(-1, -2), beta=2, alpha=-2)
        change = cross + cross.transpose(-1, -2)  # (B, M, M), dD
        first = definite.solve(self.self_factor, (xx.plan * change).sum(-1, keepdim=True))  # (B, M, 1), dh
        return PlanChange(plan_change, dual, xx.plan * (first + first.transpose(-1, -2) - change) / epsilon)

    def hessian_product(self, direction: Tensor) -> Tensor:
        """``H w = 2 (Q w + dQ X - dP Y)``, with diag(a) for Q where the energy is not debiased."""
        change = self.along(direction)
        if self.solved.xx is None or change.self_plan is None:
            own = self.energy.point_masses.unsqueeze(-1) * direction
        else:
            own = torch.bmm(self.solved.xx.plan, direction).baddbmm_(change.self_plan, self.solved.points)
        return own.baddbmm_(change.plan, self.energy.nodes, beta=2, alpha=-2)
