r"""Entropic optimal transport between two clouds (section 3.2 of the paper, eqs. 5 to 10).

.. math::
    L_C^\varepsilon(a, b) = \min_{P \in U(a, b)} \langle C, P\rangle - \varepsilon H(P),
    \qquad P^*_{ij} = \exp((f_i + g_j - C_{ij}) / \varepsilon)

All problems are batched ``(B, M, N)`` and solved in the log domain, each to its own tolerance.
:func:`sinkhorn` is the block coordinate ascent of the paper (eq. 6). :func:`solve` is what the flow uses: given f, the best g
is known in closed form, and Newton's method on the M unknowns that remain (the semi-dual) needs 2 to 5 iterations
where Sinkhorn needs hundreds. :func:`solve_self` does the same for a cloud against itself, where f = g.

Masses b enter as weights of the sums over nodes, never as a divisor, so a node of mass zero is a node that is absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flowpool.core.constants import DAMPING, LOOSE, MATCHING, MAX_ITERATIONS, MISPLACED, MOST_STAGES, ROUNDING, STAGE

_HOPELESS = 12  # refused steps in a row after which rounding has the last word


@dataclass(frozen=True)
class Transport:
    """Solution of a batch of transport problems.

    Attributes:
        potential: f, ``(B, M)``.
        conditional: ``A = P / b``, whose columns sum to one, ``(B, M, N)``; defined where b is zero, too.
        plan: P, ``(B, M, N)``.
        error: what is left of the row constraint, ``|P 1 - a|_1``, ``(B,)``.
        iterations: ``(B,)``.
    """

    potential: Tensor
    conditional: Tensor
    plan: Tensor
    error: Tensor
    iterations: Tensor

    def dual_potential(self, cost: Tensor, masses: Tensor, epsilon: Tensor) -> Tensor:
        """g, with ``P = exp((f + g - C) / epsilon)``, ``(B, N)``; minus infinity where b is zero."""
        return _soft_minimum(self.potential, cost, epsilon) + epsilon[:, None] * masses.log()

    def value(self, cost: Tensor, point_masses: Tensor, masses: Tensor, epsilon: Tensor) -> Tensor:
        r""":math:`L^\varepsilon_C = \langle f, a\rangle + \langle g, b\rangle`, ``(B,)``.

        This is the primal value with :math:`H(P) = -\sum P \log P`; the dual objective printed in the paper is lower
        by the constant epsilon, which no divergence and no gradient notices.
        """
        dual = (masses * _soft_minimum(self.potential, cost, epsilon)).sum(-1)
        entropy: Tensor = torch.special.xlogy(masses, masses).sum(-1)
        return (point_masses * self.potential).sum(-1) + dual + epsilon * entropy


def _soft_minimum(potential: Tensor, cost: Tensor, epsilon: Tensor) -> Tensor:
    """``-epsilon log sum_i exp((f_i - C_ij) / epsilon)``, ``(B, N)``: the best g for this f, where b is one."""
    scaled = (potential[..., None] - cost) / epsilon[:, None, None]
    return -epsilon[:, None] * scaled.logsumexp(-2)


def sinkhorn(
    cost: Tensor,
    point_masses: Tensor,
    masses: Tensor,
    epsilon: Tensor,
    potential: Tensor | None = None,
    tolerance: float = 1e-9,
    max_iterations: int = 10_000,
) -> Transport:
    """Plan by alternating updates of f and g, each of which makes one marginal exact.

    Args:
        cost: C, ``(B, M, N)``.
        point_masses: a, ``(B, M)``, positive.
        masses: b, ``(B, N)``.
        epsilon: ``(B,)``.
        potential: f to start from.
        tolerance: on ``|P 1 - a|_1``. A problem that has reached it is left alone.
    """
    potential = (cost * masses.unsqueeze(-2)).sum(-1) if potential is None else potential
    iterations = torch.zeros_like(epsilon, dtype=torch.long)
    for iteration in range(max_iterations + 1):
        conditional = _conditional(potential, cost, epsilon)
        rows = (conditional * masses.unsqueeze(-2)).sum(-1)
        error = (point_masses - rows).abs().sum(-1)
        unfinished = ~(error <= tolerance)
        if iteration == max_iterations or not bool(unfinished.any()):
            break
        step = epsilon[:, None] * (point_masses / rows).log()
        potential = torch.where(unfinished[:, None], potential + step, potential)
        iterations += unfinished
    return Transport(potential, conditional, conditional * masses.unsqueeze(-2), error, iterations)


def _conditional(potential: Tensor, cost: Tensor, epsilon: Tensor) -> Tensor:
    return ((potential[..., None] - cost) / epsilon[:, None, None]).softmax(-2)


def solve(
    cost: Tensor,
    point_masses: Tensor,
    masses: Tensor,
    epsilon: Tensor,
    potential: Tensor | None = None,
    tolerance: Tensor | float = 1e-12,
) -> Transport:
    r"""Plan by Newton's method on the semi-dual, the same as :func:`sinkhorn` gives.

    .. math::
        F(f) = \langle a, f\rangle - \varepsilon \sum_j b_j \log \sum_i e^{(f_i - C_{ij})/\varepsilon},
        \quad \nabla F = a - r,
        \quad -\varepsilon \nabla^2 F = S = \operatorname{diag}(r) - A \operatorname{diag}(b) A^\top

    A warm ``potential`` is used as it is; without one, epsilon comes down in stages. Arguments as for
    :func:`sinkhorn`; ``tolerance`` may differ from problem to problem, ``(B,)``.
    """
    if potential is None:
        start = _cold_start(cost, point_masses, masses, epsilon)
        found = solve(cost, point_masses, masses, epsilon, start.potential, tolerance)
        return replace(found, iterations=start.iterations + found.iterations)
    weights, level = masses.unsqueeze(-2), epsilon[:, None, None]

    def plan_at(trial: Tensor) -> tuple[Tensor, Tensor]:
        conditional = ((trial.unsqueeze(-1) - cost) / level).softmax(-2)
        return conditional * weights, conditional

    def newton(plan: Tensor, conditional: Tensor, rows: Tensor, slack: Tensor, ridge: Tensor) -> Tensor:
        return _solve(_schur(plan, conditional, rows, ridge * point_masses), slack)

    return _ascend(plan_at, newton, potential, epsilon, point_masses, tolerance)


def _ascend(
    plan_at: Callable[[Tensor], tuple[Tensor, Tensor]],
    newton: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor],
    potential: Tensor,
    epsilon: Tensor,
    point_masses: Tensor,
    tolerance: Tensor | float,
) -> Transport:
    """The maximum of a concave function of the potential, by steps that are shortened until they climb.

    Args:
        plan_at: maps a potential to the plan P and the conditional A.
        newton: maps P, A, the sums of the rows of P, their slack and a ridge ``(B, 1)`` to a step in units of epsilon.
    """
    target = torch.as_tensor(tolerance, dtype=epsilon.dtype, device=epsilon.device).clamp_min(ROUNDING).unsqueeze(-1)
    level = epsilon.unsqueeze(-1)
    trial = base = potential
    smallest = torch.full_like(level, math.inf)  # (B, 1), error at the base
    damping = torch.full_like(level, DAMPING)
    refused = iterations = none = torch.zeros_like(level, dtype=torch.long)
    for iteration in range(MAX_ITERATIONS + 1):
        plan, conditional = plan_at(trial)
        rows = plan.sum(-1)
        slack = point_masses - rows
        error = slack.abs().sum(-1, keepdim=True)
        # A step is kept if it halves the error, or if the concave objective still rises where it ends.
        kept = (error <= smallest / 2) | ((slack * (trial - base)).sum(-1, keepdim=True) >= 0)
        settled = error <= target
        # Mostly all are kept, as the host, which has to ask whether that was all, learns in the same breath.
        ended, smooth = torch.stack([settled.all(), kept.all()]).tolist()
        if not smooth:
            refused = (refused + 1).masked_fill_(kept, 0)
            settled = settled | (refused > _HOPELESS)
            ended = bool(settled.all())
        if ended or iteration == MAX_ITERATIONS:
            break
        following = torch.addcmul(trial, level, newton(plan, conditional, rows, slack, damping * error))
        if smooth:
            base, smallest, damping, refused = trial, error, 0.3 * damping, none
        else:
            following = torch.where(kept, following, base.lerp(trial, 0.25))
            base, smallest = torch.where(kept, trial, base), torch.where(kept, error, smallest)
            damping = torch.where(kept, 0.3 * damping, 10.0 * damping)
        trial = torch.where(settled, trial, following)
        iterations = iterations + ~settled
    return Transport(trial, conditional, plan, error.squeeze(-1), iterations.squeeze(-1))


def _solve(matrix: Tensor, right: Tensor) -> Tensor:
    """``matrix^-1 right`` of positive definite matrices ``(B, M, M)``; zero where rounding has made one indefinite."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    return torch.cholesky_solve(right.unsqueeze(-1), factor).squeeze(-1).masked_fill_(failed.unsqueeze(-1) != 0, 0.0)


class _Start(NamedTuple):
    potential: Tensor  # (B, M)
    iterations: Tensor  # (B,), what it cost


def _cold_start(cost: Tensor, point_masses: Tensor, masses: Tensor, epsilon: Tensor) -> _Start:
    """A potential to start from where nothing is known.

    Epsilon comes down in stages from the size of the cost, since Newton started at a small epsilon sees a flat
    objective.
    """
    potential = (cost * masses.unsqueeze(-2)).sum(-1)
    iterations = torch.zeros_like(epsilon, dtype=torch.long)
    stage, loose = cost.abs().amax((-1, -2)) / 4, min(LOOSE, MISPLACED / point_masses.shape[-1])
    for _ in range(MOST_STAGES):
        above = stage > epsilon
        if not bool(above.any()):
            break
        level, target = torch.where(above, stage, epsilon), torch.where(above, loose, torch.inf)
        found = solve(cost, point_masses, masses, level, potential, target)
        potential, iterations = found.potential, iterations + found.iterations
        stage = STAGE * stage
    return _Start(potential, iterations)


def schur(plan: Tensor, conditional: Tensor, ridge: Tensor | float = 0.0) -> Tensor:
    """``diag(P 1) - A diag(b) A^T``, the matrix of all linear systems with the plan, ``(B, M, M)``, made invertible.

    It vanishes on the constants, which change no plan; the added constant decides those. Where the plan is nearly a
    matching it vanishes altogether, and so do the right-hand sides; the small diagonal keeps 0 / 0 away.
    """
    return _schur(plan, conditional, plan.sum(-1), ridge)


def _schur(plan: Tensor, conditional: Tensor, rows: Tensor, ridge: Tensor | float) -> Tensor:
    """:func:`schur`, given the sums ``P 1``."""
    matrix = 1.0 / plan.shape[-2] ** 2 - torch.bmm(plan, conditional.transpose(-1, -2))
    matrix.diagonal(dim1=-2, dim2=-1).add_((1 + MATCHING) * rows + ridge)
    return matrix


class SelfTransport(NamedTuple):
    """Transport of a cloud onto itself: ``Q = exp((h_i + h_k - D_ik) / epsilon)``.

    Attributes:
        potential: h, ``(B, M)``.
        plan: Q, symmetric, ``(B, M, M)``.
        error: ``|Q 1 - a|_1``, ``(B,)``.
    """

    potential: Tensor
    plan: Tensor
    error: Tensor

    def value(self, masses: Tensor) -> Tensor:
        """``L_D = 2 <h, a>``, ``(B,)``."""
        # Nodes without mass have a potential of minus infinity and no part in the sum.
        return 2 * torch.where(masses > 0, masses * self.potential, 0.0).sum(-1)


def sinkhorn_self(
    cost: Tensor, masses: Tensor, epsilon: Tensor, tolerance: float = 1e-9, max_iterations: int = 10_000
) -> SelfTransport:
    """Plan of a cloud with itself by Sinkhorn's update, averaged with where it starts: half a step for f and for g."""
    potential = epsilon[:, None] / 2 * masses.log()
    for iteration in range(max_iterations + 1):
        plan = ((potential.unsqueeze(-1) + potential.unsqueeze(-2) - cost) / epsilon[:, None, None]).exp()
        rows = plan.sum(-1)
        error = (masses - rows).abs().sum(-1)
        unfinished = ~(error <= tolerance)
        if iteration == max_iterations or not bool(unfinished.any()):
            break
        step = epsilon[:, None] / 2 * (masses / rows).log()
        potential = torch.where(unfinished[:, None], potential + step, potential)
    return SelfTransport(potential, plan, error)


def solve_self(
    cost: Tensor,
    masses: Tensor,
    epsilon: Tensor,
    potential: Tensor | None = None,
    tolerance: Tensor | float = 1e-12,
) -> SelfTransport:
    r"""Plan of a cloud with itself by Newton's method on h.

    .. math:: (\operatorname{diag}(Q 1) + Q)\, \delta = a - Q 1, \qquad h \leftarrow h + \varepsilon \delta

    Q is positive semi-definite for the usual costs, so the matrix has a condition number of about 2 and Newton needs
    two or three iterations.
    """
    if potential is None:
        potential = epsilon[:, None] / 2 * masses.log()
    level = epsilon[:, None, None]
    present = masses > 0

    def plan_at(trial: Tensor) -> tuple[Tensor, Tensor]:
        plan = ((trial.unsqueeze(-1) + trial.unsqueeze(-2) - cost) / level).exp()
        return plan, plan

    def newton(plan: Tensor, _: Tensor, __: Tensor, slack: Tensor, ___: Tensor) -> Tensor:
        matrix = plan.clone()
        # A node without mass has an empty row; the one on its diagonal keeps the matrix invertible.
        matrix.diagonal(dim1=-2, dim2=-1).add_(torch.where(present, masses - slack, 1.0))
        step = _solve(matrix, slack)
        return step / step.abs().amax(-1, keepdim=True).clamp_min(1.0)  # beyond one epsilon exp outruns its tangent

    found = _ascend(plan_at, newton, potential, epsilon, masses, tolerance)
    return SelfTransport(found.potential, found.plan, found.error)


class DifferentiablePlan(torch.autograd.Function):
    r"""P as a differentiable function of C, a, b and epsilon, given the solved transport.

    The constraints are differentiated implicitly: with :math:`T = P \odot \bar P`, multipliers from
    :math:`\lambda_i a_i + \sum_j P_{ij} \mu_j = T 1` and :math:`\sum_i P_{ij} \lambda_i + b_j \mu_j = T^\top 1` give
    :math:`\bar C = P \odot (\lambda_i + \mu_j - \bar P) / \varepsilon`, :math:`\bar a = \lambda`, :math:`\bar b = \mu`.
    """

    @staticmethod
    def forward(
        ctx: Any, cost: Tensor, point_masses: Tensor, masses: Tensor, epsilon: Tensor, solved: Transport
    ) -> Tensor:
        factor, _ = torch.linalg.cholesky_ex(schur(solved.plan, solved.conditional))
        ctx.save_for_backward(cost, epsilon, solved.conditional, solved.plan, factor)
        return solved.plan.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        cost, epsilon, conditional, plan, factor = ctx.saved_tensors
        columns = (conditional * upstream).sum(-2)  # (B, N), T^T 1 / b
        right = (plan * (upstream - columns.unsqueeze(-2))).sum(-1)
        first = torch.cholesky_solve(right.unsqueeze(-1), factor).squeeze(-1)  # (B, M), lambda
        second = columns - (conditional * first.unsqueeze(-1)).sum(-2)  # (B, N), mu
        to_cost = plan * (first.unsqueeze(-1) + second.unsqueeze(-2) - upstream) / epsilon[:, None, None]
        return to_cost, first, second, -(to_cost * cost).sum((-1, -2)) / epsilon, None


class DifferentiableSelfPlan(torch.autograd.Function):
    r"""Q as a differentiable function of D, a and epsilon, given the solved self-transport.

    :math:`(\operatorname{diag}(a) + Q) \lambda = (T + T^\top) 1` with :math:`T = Q \odot \bar Q` gives
    :math:`\bar D = (Q_{ik} \lambda_i - T_{ik}) / \varepsilon` and :math:`\bar a = \lambda`.
    """

    @staticmethod
    def forward(ctx: Any, cost: Tensor, masses: Tensor, epsilon: Tensor, solved: SelfTransport) -> Tensor:
        factor = torch.linalg.cholesky_ex(torch.diag_embed(masses) + solved.plan)[0]
        ctx.save_for_backward(cost, epsilon, solved.plan, factor)
        return solved.plan.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        cost, epsilon, plan, factor = ctx.saved_tensors
        weighted = plan * upstream
        right = weighted.sum(-1) + weighted.sum(-2)
        multiplier = torch.cholesky_solve(right.unsqueeze(-1), factor).squeeze(-1)  # (B, M)
        to_cost = (plan * multiplier.unsqueeze(-1) - weighted) / epsilon[:, None, None]
        return to_cost, multiplier, -(to_cost * cost).sum((-1, -2)) / epsilon, None


def exact_transport(cost: Tensor, point_masses: Tensor, masses: Tensor) -> tuple[Tensor, Tensor]:
    """Plan and value of unregularised transport L_C, one problem ``(M, N)``, by POT's network simplex."""
    try:
        import ot
    except ImportError as error:
        raise ImportError("Exact transport needs POT: pip install 'flowpool[lab]'.") from error
    arrays = (x.detach().cpu().double().numpy() for x in (point_masses, masses, cost))
    plan = torch.from_numpy(np.asarray(ot.emd(*arrays))).to(cost)
    return plan, (plan * cost).sum()


def wasserstein(
    points: Tensor, nodes: Tensor, masses: Tensor | None = None, point_masses: Tensor | None = None, power: float = 2.0
) -> Tensor:
    """The exact distance W_p between the clouds ``(M, D)`` and ``(N, D)``, uniform unless masses are given."""
    point_masses = points.new_full((len(points),), 1 / len(points)) if point_masses is None else point_masses
    masses = nodes.new_full((len(nodes),), 1 / len(nodes)) if masses is None else masses
    _, value = exact_transport(torch.cdist(points, nodes).pow(power), point_masses, masses)
    return value.pow(1 / power)
