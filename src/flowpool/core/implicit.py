r"""Gradients through the optimality condition (section 8.2 of the paper, eqs. 32 to 42).

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
from flowpool.core.hessian import PlanResponse, curvature, hessian_product
from flowpool.core.systems import Adjoint, System


class Gradients(NamedTuple):
    """Vector-Jacobian products of the pooled points; ``None`` for what was neither asked for nor had for free."""

    nodes: Tensor | None  # (B, N, D)
    masses: Tensor | None  # (B, N), up to a constant per cloud
    point_masses: Tensor | None  # (B, M), up to a constant per cloud
    epsilon: Tensor | None  # (B,)
    parameters: dict[str, Tensor]


def vector_jacobian(
    energy: Energy,
    solved: Evaluation,
    cotangent: Tensor,
    ridge: Tensor,
    wanted: set[str],
    weights: Tensor | None = None,
) -> tuple[Gradients, Adjoint]:
    """Gradients of ``<v, X*>`` in the named tensors of the energy, and the linear solve behind them.

    Args:
        energy: the clouds.
        solved: the evaluation at X*, with tightly solved inner problems.
        cotangent: v, ``(B, M, D)``.
        ridge, weights: see :meth:`flowpool.core.systems.System.adjoint`.
        wanted: of ``"nodes"``, ``"masses"``, ``"point_masses"``, ``"epsilon"`` and names of cost parameters.
    """
    adjoint = System(curvature(energy, solved), hessian_product(energy, solved)).adjoint(cotangent, ridge, weights)
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
