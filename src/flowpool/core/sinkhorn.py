r"""Entropic optimal transport between two clouds (section 3.2 of the paper, eqs. 5 to 10).

.. math::
    L_C^\varepsilon(a, b) = \min_{P \in U(a, b)} \langle C, P\rangle - \varepsilon H(P),
    \qquad P^*_{ij} = \exp((f_i + g_j - C_{ij}) / \varepsilon)

The paper alternates the best f for a g with the best g for an f (eq. 6). Given f, the best g is known in closed form, and
M unknowns remain:

.. math::
    F(f) = \langle a, f\rangle - \varepsilon \sum_j b_j \log \sum_i e^{(f_i - C_{ij})/\varepsilon},
    \quad \nabla F = a - r,
    \quad -\varepsilon \nabla^2 F = S = \operatorname{diag}(r) - A \operatorname{diag}(b) A^\top

with :math:`r = P 1`. Newton's method on this concave semi-dual needs 2 to 5 iterations where the alternation needs hundreds.
It is safe without a line search: the third derivative of F along a step is at most the range d of the step, in units of
epsilon, times the second, so that a share of :math:`\log(1 + d) / d` of a Newton step always climbs, and so does
:math:`1 / (1 + d / 2)`, which is less.

The transport of a cloud to itself is the same problem with b = a. Masses b enter as weights of the sums over nodes, never as
a divisor, so a node of mass zero is a node that is absent.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flowpool.core.constants import (
    LOOSE,
    MATCHING,
    MAX_ITERATIONS,
    MISPLACED,
    MOST_STAGES,
    NEARLY,
    PIVOTS,
    ROUNDING,
    SOON,
    STAGE,
)

AT_ONCE = 3  # Newton iterations between two looks at what is left, for which the host waits


class Transport(NamedTuple):
    """Solutions of transport problems ``(..., M, N)``, in units of epsilon.

    Attributes:
        potential: f, ``(..., M)``.
        conditional: ``A = P / b``, whose columns sum to one, ``(..., M, N)``; defined where b is zero, too.
        plan: P, ``(..., M, N)``.
        error: what is left of the row constraint, ``|P 1 - a|_1``, ``(...)``.
    """

    potential: Tensor
    conditional: Tensor
    plan: Tensor
    error: Tensor


def newton(
    cost: Tensor, point_masses: Tensor, masses: Tensor, potential: Tensor, iterations: int = AT_ONCE
) -> Transport:
    """Some Newton iterations on the semi-dual. Nothing here waits for a device.

    Args:
        cost: C in units of epsilon, ``(..., M, N)``.
        point_masses: a, ``(..., M)``.
        masses: b, ``(..., N)``.
        potential: f to start from, in units of epsilon.
    """
    target = point_masses.unsqueeze(-1)
    # Where a plan is nearly a matching S vanishes, as it does for a point without mass; this keeps 0 / 0 away.
    # S also vanishes on the constants, which change no plan.
    base = torch.diag_embed(torch.where(point_masses > 0, MATCHING * point_masses, 1.0)) + 1.0 / cost.shape[-2] ** 2
    potential = (potential - potential.amax(-1, keepdim=True)).unsqueeze(-1)  # a constant would only cost digits
    for iteration in range(iterations + 1):
        conditional = (potential - cost).softmax(-2)
        plan = conditional * masses.unsqueeze(-2)
        rows = plan.sum(-1)
        slack = target - rows.unsqueeze(-1)
        if iteration == iterations:
            break
        matrix = base - plan @ conditional.mT
        matrix.diagonal(dim1=-2, dim2=-1).add_(rows)
        step = torch.cholesky_solve(slack, torch.linalg.cholesky_ex(matrix)[0]).nan_to_num(0.0, 0.0, 0.0)
        potential = torch.addcdiv(potential, step, 1 + torch.linalg.vector_norm(step, math.inf, -2, keepdim=True))
    return Transport(potential.squeeze(-1), conditional, plan, slack.abs().sum((-1, -2)))


def soft_minimum(potential: Tensor, cost: Tensor) -> Tensor:
    """``-log sum_i exp(f_i - C_ij)``, ``(..., N)``, all in units of epsilon: the best g for this f, where b is one."""
    return -(potential.unsqueeze(-1) - cost).logsumexp(-2)


def opposite(dual: Tensor, cost: Tensor, point_masses: Tensor, masses: Tensor) -> Tensor:
    """The best f for the g of :func:`soft_minimum`, ``(..., M)``: the other half of Sinkhorn's alternation.

    Points that have moved far since g was found get from it a potential that is nearly right.
    """
    carried: Tensor = ((dual + masses.log()).unsqueeze(-2) - cost).logsumexp(-1)
    return point_masses.log() - carried


def solve(
    cost: Tensor,
    point_masses: Tensor,
    masses: Tensor,
    epsilon: Tensor,
    potential: Tensor | None = None,
    tolerance: Tensor | float = 1e-12,
) -> Transport:
    """The plans of a batch of problems.

    Without a potential to start from epsilon comes down in stages from the size of the cost, since Newton started at a
    small epsilon sees a flat objective.

    Args:
        cost: C, ``(..., M, N)``.
        point_masses: a, ``(..., M)``.
        masses: b, ``(..., N)``.
        epsilon: ``(...)``.
        potential: f to start from, in units of epsilon.
        tolerance: on ``|P 1 - a|_1``, ``(...)`` or one for all.
    """
    if potential is not None:
        found, ended = _ascend(cost / epsilon[..., None, None], point_masses, masses, potential, tolerance, SOON)
        if ended:
            return found  # else it was no good start
    loose = min(LOOSE, MISPLACED / point_masses.shape[-1])
    size = torch.where((masses > 0).unsqueeze(-2), cost.abs(), 0.0).amax((-1, -2)) / 4
    steepest = float((size / epsilon).nan_to_num(0.0, 0.0, 0.0).amax()) if size.numel() else 0.0
    level = torch.maximum(size, epsilon)
    potential = opposite(torch.zeros_like(masses), cost / level[..., None, None], point_masses, masses)
    for stage in range(1, min(MOST_STAGES, math.ceil(math.log(max(steepest, 1.0)) / -math.log(STAGE)) + 1)):
        found, _ = _ascend(cost / level[..., None, None], point_masses, masses, potential, loose)
        following = torch.maximum(size * STAGE**stage, epsilon)
        potential = found.potential * (level / following).unsqueeze(-1)
        level = following
    return _ascend(cost / level[..., None, None], point_masses, masses, potential, tolerance)[0]


def _ascend(
    cost: Tensor,
    point_masses: Tensor,
    masses: Tensor,
    potential: Tensor,
    tolerance: Tensor | float,
    iterations: int = MAX_ITERATIONS,
) -> tuple[Transport, bool]:
    """Newton iterations until every problem is solved, or rounding has the last word; and whether that was reached.

    An update of the alternation comes before each few of them: it carries a potential to its place however far that is,
    where the plan of a point has run empty and Newton sees nothing.
    """
    goal = torch.as_tensor(tolerance, dtype=cost.dtype, device=cost.device).clamp_min(ROUNDING)
    before = torch.full_like(goal, torch.inf)
    for _ in range(math.ceil(iterations / AT_ONCE)):
        carried = opposite(soft_minimum(potential, cost), cost, point_masses, masses)
        found = newton(cost, point_masses, masses, carried)
        going = (found.error > goal) & ((found.error < 0.5 * before) | (found.error > NEARLY))
        if not bool(going.any()):
            return found, True
        potential, before = found.potential, found.error
    return found, False


def value(cost: Tensor, point_masses: Tensor, masses: Tensor, epsilon: Tensor, solved: Transport) -> Tensor:
    r""":math:`L^\varepsilon_C = \langle f, a\rangle + \langle g, b\rangle`, ``(...)``.

    This is the primal value with :math:`H(P) = -\sum P \log P`; the dual objective printed in the paper is lower
    by the constant epsilon, which no divergence and no gradient notices.
    """
    potential, dual = potentials(cost, masses, epsilon, solved)
    own = torch.where(point_masses > 0, point_masses * potential, 0.0).sum(-1)
    return own + torch.where(masses > 0, masses * dual, 0.0).sum(-1)


def potentials(cost: Tensor, masses: Tensor, epsilon: Tensor, solved: Transport) -> tuple[Tensor, Tensor]:
    """f and g with ``P = exp((f + g - C) / epsilon)``, ``(..., M)`` and ``(..., N)``; g is minus infinity where b is zero."""
    dual = soft_minimum(solved.potential, cost / epsilon[..., None, None]) + masses.log()
    return epsilon.unsqueeze(-1) * solved.potential, epsilon.unsqueeze(-1) * dual


class DifferentiablePlan(torch.autograd.Function):
    r"""P as a differentiable function of C, a, b and epsilon, ``(..., M, N)``, given the solved transport.

    The constraints are differentiated implicitly: with :math:`T = P \odot \bar P`, multipliers from
    :math:`\lambda_i a_i + \sum_j P_{ij} \mu_j = T 1` and :math:`\sum_i P_{ij} \lambda_i + b_j \mu_j = T^\top 1` give
    :math:`\bar C = P \odot (\lambda_i + \mu_j - \bar P) / \varepsilon`, :math:`\bar a = \lambda`, :math:`\bar b = \mu`.
    """

    @staticmethod
    def forward(
        ctx: Any, cost: Tensor, point_masses: Tensor, masses: Tensor, epsilon: Tensor, solved: Transport
    ) -> Tensor:
        ctx.save_for_backward(cost, epsilon, solved.conditional, solved.plan)
        return solved.plan.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        cost, epsilon, conditional, plan = ctx.saved_tensors
        columns = (conditional * upstream).sum(-2)  # (..., N), T^T 1 / b
        right = (plan * (upstream - columns.unsqueeze(-2))).sum(-1, keepdim=True)
        first = torch.cholesky_solve(right, factor(plan, conditional))  # (..., M, 1), lambda
        second = columns - (conditional * first).sum(-2)  # (..., N), mu
        to_cost = plan * (first + second.unsqueeze(-2) - upstream) / epsilon[..., None, None]
        return to_cost, first.squeeze(-1), second, -(to_cost * cost).sum((-1, -2)) / epsilon, None


def factor(plan: Tensor, conditional: Tensor) -> Tensor:
    """Cholesky factor of S, ``(..., M, M)``, the matrix of all linear systems with a plan, made invertible."""
    matrix = 1.0 / plan.shape[-2] ** 2 - plan @ conditional.mT
    matrix.diagonal(dim1=-2, dim2=-1).add_(plan.sum(-1), alpha=1 + MATCHING)
    lower: Tensor = torch.linalg.cholesky_ex(matrix)[0]
    return lower


def exact_transport(cost: Tensor, point_masses: Tensor, masses: Tensor) -> tuple[Tensor, Tensor]:
    """Plan and value of unregularised transport L_C, one problem ``(M, N)``, by POT's network simplex."""
    try:
        import ot
    except ImportError as error:
        raise ImportError("Exact transport needs POT: pip install 'flowpool[lab]'.") from error
    given, taken, costs = (x.detach().cpu().double().numpy() for x in (point_masses, masses, cost))
    unit = float(costs.max()) or 1.0  # POT takes what is below some absolute size for nothing
    plan = torch.from_numpy(np.asarray(ot.emd(given, taken, costs / unit, numItermax=PIVOTS))).to(cost)
    return plan, (plan * cost).sum()


def wasserstein(
    points: Tensor, nodes: Tensor, masses: Tensor | None = None, point_masses: Tensor | None = None, power: float = 2.0
) -> Tensor:
    """The exact distance W_p between the clouds ``(M, D)`` and ``(N, D)``, uniform unless masses are given."""
    point_masses = points.new_full((len(points),), 1 / len(points)) if point_masses is None else point_masses
    masses = nodes.new_full((len(nodes),), 1 / len(nodes)) if masses is None else masses
    # Not by products: a difference of squares would lose the distance of clouds that are far from zero.
    apart = torch.cdist(points, nodes, compute_mode="donot_use_mm_for_euclid_dist")
    _, value = exact_transport(apart.pow(power), point_masses, masses)
    return value.pow(1 / power)
