r"""Entropic optimal transport between two clouds (section 3.2 of the paper).

.. math::
    L_C^\varepsilon(a, b) = \min_{P \in U(a, b)} \langle C, P\rangle - \varepsilon H(P),
    \qquad P^*_{ij} = \exp((f_i + g_j - C_{ij}) / \varepsilon)

All problems are batched ``(B, M, N)`` and solved in the log domain, each to its own tolerance.
:func:`sinkhorn` is the block coordinate ascent of the paper. :func:`solve` is what the flow uses: given f, the best g
is known in closed form, and Newton's method on the M unknowns that remain (the semi-dual) needs 2 to 5 iterations
where Sinkhorn needs hundreds. :func:`solve_self` does the same for a cloud against itself, where f = g.

Masses b enter as weights of the sums over nodes, never as a divisor, so a node of mass zero is a node that is absent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_ITERATIONS = 200  # of Newton; a cold start at a relative epsilon of 1e-3 needs about 60
_LOOSE = 0.03  # marginal error at which a stage of the cold start is good enough
_STAGE = 0.3  # factor between two stages of the cold start
_ROUNDING = 2e-14  # marginal error that float64 sums cannot get below
_HOPELESS = 1e8  # damping at which Newton has stopped moving
_MATCHING = 1e-13  # share of a point's mass below which what it gives to a second node is rounding


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


class _Iterate(NamedTuple):
    """Everything that depends on the current potential."""

    potential: Tensor  # (B, M)
    conditional: Tensor  # (B, M, N)
    plan: Tensor  # (B, M, N)
    slack: Tensor  # (B, M), a - P 1
    error: Tensor  # (B,)
    objective: Tensor  # (B,), grows towards the solution


def _choose(first: Tensor, one: Any, other: Any) -> Any:
    """One iterate where ``first`` holds, the other elsewhere."""
    if bool(first.all()):
        return one
    picked = (torch.where(first.view(-1, *[1] * (x.dim() - 1)), x, y) for x, y in zip(one, other, strict=True))
    return type(one)(*picked)


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

    A warm ``potential`` is used as it is. Without one, epsilon comes down in stages from the size of the cost, since
    Newton started at a small epsilon sees a flat objective. Arguments as for :func:`sinkhorn`; ``tolerance`` may differ
    from problem to problem, ``(B,)``.
    """
    stage = epsilon
    if potential is None:
        potential = (cost * masses.unsqueeze(-2)).sum(-1)
        stage = torch.maximum(epsilon, cost.abs().amax((-1, -2)) / 4)
    target = torch.as_tensor(tolerance, dtype=cost.dtype, device=cost.device).clamp_min(_ROUNDING)
    damping = torch.full_like(epsilon, 1e-3)
    iterations = torch.zeros_like(epsilon, dtype=torch.long)
    now = _semi_dual(potential, cost, point_masses, masses, stage)
    for _ in range(MAX_ITERATIONS):
        done = (stage <= epsilon) & (now.error <= target) | (damping > _HOPELESS) | ~now.error.isfinite()
        if bool(done.all()):
            break
        descend = ~done & (stage > epsilon) & (now.error <= _LOOSE)
        stage = torch.where(descend, torch.maximum(_STAGE * stage, epsilon), stage)
        step = stage[:, None] * _newton_step(now, point_masses, damping)
        still = (done | descend)[:, None]
        trial = _semi_dual(torch.where(still, now.potential, now.potential + step), cost, point_masses, masses, stage)
        # A step is kept if it halves the error or raises the concave objective.
        better = (trial.error <= now.error / 2) | (trial.objective >= now.objective)
        now = _choose(descend | ~done & better, trial, now)
        damping = torch.where(done | descend, damping, damping * torch.where(better, 0.3, 10.0))
        iterations += ~done
    return Transport(now.potential, now.conditional, now.plan, now.error, iterations)


def _semi_dual(potential: Tensor, cost: Tensor, point_masses: Tensor, masses: Tensor, epsilon: Tensor) -> _Iterate:
    scaled = (potential[..., None] - cost) / epsilon[:, None, None]
    logsum = scaled.logsumexp(-2)  # (B, N)
    conditional = (scaled - logsum.unsqueeze(-2)).exp()
    plan = conditional * masses.unsqueeze(-2)
    slack = point_masses - plan.sum(-1)
    objective = (point_masses * potential).sum(-1) - epsilon * (masses * logsum).sum(-1)
    return _Iterate(potential, conditional, plan, slack, slack.abs().sum(-1), objective)


def _newton_step(now: _Iterate, point_masses: Tensor, damping: Tensor) -> Tensor:
    """Damped Newton step in units of epsilon, or a Sinkhorn step where the matrix cannot be factorised, ``(B, M)``."""
    ridge = (damping * now.error)[:, None] * point_masses
    factor, failed = torch.linalg.cholesky_ex(schur(now) + torch.diag_embed(ridge))
    newton = torch.cholesky_solve(now.slack.unsqueeze(-1), factor).squeeze(-1)
    ascent = torch.log(point_masses / (point_masses - now.slack).clamp_min(torch.finfo(newton.dtype).tiny))
    usable = (failed == 0)[:, None] & newton.isfinite().all(-1, keepdim=True)
    return torch.where(usable, newton, ascent)


def schur(now: _Iterate | Transport) -> Tensor:
    """``diag(P 1) - A diag(b) A^T``, the matrix of all linear systems with the plan, ``(B, M, M)``, made invertible.

    It vanishes on the constants, which change no plan; the added constant decides those. Where the plan is nearly a
    matching it vanishes altogether, and so do the right-hand sides; the small diagonal keeps 0 / 0 away.
    """
    rows = now.plan.sum(-1)
    matrix = torch.diag_embed((1 + _MATCHING) * rows) - now.plan @ now.conditional.transpose(-1, -2)
    return matrix + 1.0 / rows.shape[-1] ** 2


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
    now = _self_plan(epsilon[:, None] / 2 * masses.log(), cost, masses, epsilon)
    for _ in range(max_iterations):
        unfinished = ~(now.error <= tolerance)
        if not bool(unfinished.any()):
            break
        step = epsilon[:, None] / 2 * (masses / now.plan.sum(-1)).log()
        now = _self_plan(torch.where(unfinished[:, None], now.potential + step, now.potential), cost, masses, epsilon)
    return now


def solve_self(
    cost: Tensor,
    masses: Tensor,
    epsilon: Tensor,
    potential: Tensor | None = None,
    tolerance: Tensor | float = 1e-12,
) -> SelfTransport:
    r"""Plan of a cloud with itself: Newton on h, with averaged Sinkhorn steps where Newton does not help.

    .. math:: (\operatorname{diag}(Q 1) + Q)\, \delta = a - Q 1, \qquad h \leftarrow h + \varepsilon \delta

    Q is positive semi-definite for the usual costs, so the matrix has a condition number of about 2 and Newton needs
    two or three iterations.
    """
    if potential is None:
        potential = epsilon[:, None] / 2 * masses.log()
    target = torch.as_tensor(tolerance, dtype=cost.dtype, device=cost.device).clamp_min(_ROUNDING)
    floor = torch.finfo(cost.dtype).tiny
    now = _self_plan(potential, cost, masses, epsilon)
    stalled = torch.zeros_like(epsilon, dtype=torch.long)
    for _ in range(MAX_ITERATIONS):
        done = (now.error <= target) | (stalled > 20) | ~now.error.isfinite()
        if bool(done.all()):
            break
        rows = now.plan.sum(-1)
        # A node without mass has an empty row; the one on its diagonal keeps the matrix invertible.
        matrix = now.plan + torch.diag_embed(torch.where(rows > 0, rows, 1.0))
        factor, failed = torch.linalg.cholesky_ex(matrix)
        newton = torch.cholesky_solve((masses - rows).unsqueeze(-1), factor).squeeze(-1)
        trial = _self_plan(now.potential + epsilon[:, None] * newton, cost, masses, epsilon)
        better = (failed == 0) & (trial.error < 0.9 * now.error)
        if not bool((better | done).all()):
            average = torch.where(rows > 0, 0.5 * torch.log(masses / rows.clamp_min(floor)), 0.0)
            sinkhorn_step = _self_plan(now.potential + epsilon[:, None] * average, cost, masses, epsilon)
            trial = _choose(better, trial, sinkhorn_step)
        stalled = torch.where(trial.error < 0.9 * now.error, 0, stalled + 1)
        now = _choose(~done, trial, now)
    return now


def _self_plan(potential: Tensor, cost: Tensor, masses: Tensor, epsilon: Tensor) -> SelfTransport:
    plan = ((potential[..., None] + potential[..., None, :] - cost) / epsilon[:, None, None]).exp()
    error = (masses - plan.sum(-1)).abs().sum(-1)
    return SelfTransport(potential, plan, error)


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
        ctx.save_for_backward(cost, epsilon, solved.conditional, solved.plan, torch.linalg.cholesky(schur(solved)))
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
        factor = torch.linalg.cholesky(torch.diag_embed(masses) + solved.plan)
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
