r"""Gradients through the optimality condition (section 8.2 of the paper).

At X* the gradient of the energy vanishes, so with :math:`H = \nabla_X^2 S` the Jacobian of the pooled points solves
:math:`H J = -\partial_Y \nabla_X S`. A vector-Jacobian product needs one linear solve, whatever the number of steps
that led to X*, and serves nodes, masses, epsilon and the parameters of the cost alike:

.. math:: (H H + \lambda I)\, w = H v, \qquad v^\top J_\theta = -w^\top \partial_\theta \nabla_X S
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flowpool.core.divergence import Energy, Evaluation
from flowpool.core.hessian import DIRECT_LIMIT, Hessian, PlanResponse, hessian
from flowpool.core.records import places, put, take
from flowpool.core.systems import conjugate_gradients

_NEGLIGIBLE = 1e-3  # relative size up to which the ridge is a first-order correction
_LARGE_RIDGE = 1e-12  # from here on conjugate gradients cannot leave the ridge to a fallback


class Adjoint(NamedTuple):
    """Solution of the linear system of the backward pass.

    Attributes:
        solution: w, ``(B, M, D)``.
        residual: ``|(H H + lambda) w - H v| / |H v|``, ``(B,)``.
        damped: H is singular or indefinite, so that the ridge decided the answer, ``(B,)`` bool.
    """

    solution: Tensor
    residual: Tensor
    damped: Tensor


def solve_adjoint(curvature: Hessian, cotangent: Tensor, ridge: float) -> Adjoint:
    """Tikhonov-regularised solution of ``H w = v``, minimum-norm where H is singular.

    Args:
        curvature: H at X*.
        cotangent: v, gradient of the loss in X*, ``(B, M, D)``.
        ridge: lambda in units of the square of the Hessian's scale.
    """
    unit = curvature.unit.mean(-1)  # (B,)
    penalty = ridge * unit.square()
    found = curvature.plain.solve(cotangent)
    solution = found.solution
    if curvature.matrix is not None:
        # (H H + lambda) w = H v is (H + lambda / H) w = v; its first-order form needs the factor of H only.
        inverse = curvature.plain.solve(curvature.plain.solve(solution).solution).solution
        correction = penalty[:, None, None] * inverse
        good = found.definite & (_norm(correction) <= _NEGLIGIBLE * _norm(solution))
        solution = solution - correction
    else:
        good = found.definite & (ridge <= _LARGE_RIDGE)
    if not bool(good.all()):
        if curvature.matrix is not None:
            damped = curvature.filtered(cotangent, penalty, ~good)
        else:
            damped = _normal_equations(curvature, cotangent, penalty, good)
        solution = torch.where(good[:, None, None], solution, damped)
    return _judged(curvature, cotangent, penalty, solution, good)


def _judged(curvature: Hessian, cotangent: Tensor, penalty: Tensor, solution: Tensor, good: Tensor) -> Adjoint:
    right = curvature.product(cotangent)
    left = curvature.product(curvature.product(solution)) + penalty[:, None, None] * solution
    residual = _norm(left - right) / _norm(right).clamp_min(torch.finfo(right.dtype).tiny)
    return Adjoint(solution, residual, ~good)


def _normal_equations(curvature: Hessian, cotangent: Tensor, penalty: Tensor, skip: Tensor) -> Tensor:
    """``H (H H + penalty)^-1 v`` by conjugate gradients, as in the paper, for the clouds that are not skipped."""
    right = torch.where(skip[:, None, None], 0.0, curvature.product(cotangent))
    scale = curvature.unit.square().unsqueeze(-1)
    return conjugate_gradients(
        lambda w: curvature.product(curvature.product(w)) + penalty[:, None, None] * w,
        right,
        lambda w: w / scale,
    ).solution


def _find_adjoint(energy: Energy, solved: Evaluation, cotangent: Tensor, ridge: float) -> Adjoint:
    """:func:`solve_adjoint` with conjugate gradients where they do, and with the whole matrix where H is singular."""
    curvature = hessian(energy, solved)
    size = cotangent[0].numel()
    if curvature.matrix is not None or size > DIRECT_LIMIT:
        return solve_adjoint(curvature, cotangent, ridge)
    found = curvature.plain.solve(cotangent)
    sound = found.definite & found.settled & ~curvature.is_singular(found) & (ridge <= _LARGE_RIDGE)
    penalty = ridge * curvature.unit.mean(-1).square()
    adjoint = _judged(curvature, cotangent, penalty, found.solution, sound)
    hard = places(~sound, keep_pairs=True)
    if not len(hard):
        return adjoint
    whole = hessian(energy.select(hard), take(solved, hard), form=True)
    return put(adjoint, hard, solve_adjoint(whole, cotangent[hard], ridge))


class Gradients(NamedTuple):
    """Vector-Jacobian products of the pooled points; ``None`` for what was neither asked for nor had for free."""

    nodes: Tensor | None  # (B, N, D)
    masses: Tensor | None  # (B, N), up to a constant per cloud
    point_masses: Tensor | None  # (B, M), up to a constant per cloud
    epsilon: Tensor | None  # (B,)
    parameters: dict[str, Tensor]


def vector_jacobian(
    energy: Energy, solved: Evaluation, cotangent: Tensor, ridge: float, wanted: set[str]
) -> tuple[Gradients, Adjoint]:
    """Gradients of ``<v, X*>`` in the named tensors of the energy, and the linear solve behind them.

    Args:
        energy: the clouds.
        solved: the evaluation at X*, with tightly solved inner problems.
        cotangent: v, ``(B, M, D)``.
        ridge: see :func:`solve_adjoint`.
        wanted: of ``"nodes"``, ``"masses"``, ``"point_masses"``, ``"epsilon"`` and names of cost parameters.
    """
    adjoint = _find_adjoint(energy, solved, cotangent, ridge)
    if energy.geometry.is_squared_euclidean and energy.debias and "point_masses" not in wanted:
        return squared_euclidean_gradients(energy, solved, adjoint.solution), adjoint
    names = ("nodes", "masses", "point_masses", "epsilon")
    leaves = {name: getattr(energy, name).detach() for name in names}
    parameters = {name: value.detach() for name, value in energy.geometry.tensors.items()}
    inputs = [leaf.requires_grad_() for name, leaf in (leaves | parameters).items() if name in wanted]
    order = [name for name in leaves | parameters if name in wanted]
    with torch.enable_grad():
        traced = replace(energy, **leaves, geometry=replace(energy.geometry, tensors=parameters))
        gradient = traced.gradient(solved.points, solved)
        found = torch.autograd.grad(gradient, inputs, -adjoint.solution, allow_unused=True)
    result = {
        name: torch.zeros_like(leaf) if value is None else value
        for name, leaf, value in zip(order, inputs, found, strict=True)
    }
    nodes, masses, point_masses, epsilon = (result.pop(name, None) for name in names)
    return Gradients(nodes, masses, point_masses, epsilon, result), adjoint


def squared_euclidean_gradients(energy: Energy, solved: Evaluation, solution: Tensor) -> Gradients:
    r"""The products :math:`-w^\top \partial \nabla_X S` for :math:`C = |x - y|^2` in closed form, without autograd.

    With the derivatives of both plans along w, see :class:`flowpool.core.hessian.PlanResponse`:

    .. math::
        \bar y_j = 2 \textstyle\sum_i (P_{ij} w_i + \dot P_{ij} x_i), \quad \bar b = -\dot g, \quad
        \bar\varepsilon = \tfrac1\varepsilon (\langle \dot P, C\rangle - \tfrac12 \langle \dot Q, D\rangle)
    """
    points, response = solved.points, PlanResponse(energy, solved).along(solution)
    assert response.self_plan is not None  # noqa: S101 - the energy is debiased
    to_nodes = 2 * (solved.xy.plan.transpose(-1, -2) @ solution + response.plan.transpose(-1, -2) @ points)
    self_cost = energy.geometry.matrix(points, points)
    work = (response.plan * solved.cost).sum((-1, -2)) - (response.self_plan * self_cost).sum((-1, -2)) / 2
    return Gradients(to_nodes, -response.dual, None, work / energy.epsilon, {})


def _norm(value: Tensor) -> Tensor:
    return value.square().sum((-1, -2)).sqrt()
