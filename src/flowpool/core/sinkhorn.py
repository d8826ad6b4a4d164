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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flowpool.core import definite
from flowpool.core.constants import (
    DAMPING,
    LOOSE,
    MATCHING,
    MAX_ITERATIONS,
    MISPLACED,
    MOST_STAGES,
    PIVOTS,
    ROUNDING,
    STAGE,
)
from flowpool.core.records import sent

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
    return solve_both(cost, None, point_masses, masses, epsilon, potential, None, tolerance)[0]


def solve_both(
    cost: Tensor,
    self_cost: Tensor | None,
    point_masses: Tensor,
    masses: Tensor,
    epsilon: Tensor,
    potential: Tensor | None,
    self_potential: Tensor | None,
    tolerance: Tensor | float,
) -> tuple[Transport, SelfTransport | None]:
    """:func:`solve` and, given its cost, :func:`solve_self` at once: one Newton iteration is for both."""
    before: Tensor | int = 0
    if potential is None:
        potential, before = _cold_start(cost, point_masses, masses, epsilon)
    across = _ToNodes(cost, masses, epsilon)
    if self_cost is None:
        found = _ascend([across], [potential], epsilon, point_masses, tolerance)
    else:
        own = _ToItself(self_cost, epsilon)
        self_potential = _self_start(point_masses, epsilon) if self_potential is None else self_potential
        found = _ascend([across, own], [potential, self_potential], epsilon, point_masses, tolerance)
    xy = Transport(found.potential[0], across.conditional, across.plan, found.error[0], before + found.iterations[0])
    return xy, None if self_cost is None else SelfTransport(found.potential[1], own.plan, found.error[1])


def looks_every(device: torch.device) -> int:
    """Iterations after which the host looks at what a device has found; that it has to wait for, unless it is itself."""
    return 1 if device.type == "cpu" else 3


def _self_start(masses: Tensor, epsilon: Tensor) -> Tensor:
    return epsilon[:, None] / 2 * masses.log()


class _ToNodes:
    """P as a function of f."""

    limited = False

    def __init__(self, cost: Tensor, masses: Tensor, epsilon: Tensor) -> None:
        self.cost, self.weights = cost / epsilon[:, None, None], masses.unsqueeze(-2)
        self.gauge = cost.new_full((), 1.0 / cost.shape[-2] ** 2)
        self.plan = self.conditional = cost

    def rows(self, potential: Tensor) -> Tensor:
        """``P 1`` for f in units of epsilon, both ``(B, M, 1)``."""
        self.conditional = (potential - self.cost).softmax(-2)
        self.plan = self.conditional * self.weights
        return self.plan.sum(-1, keepdim=True)

    def matrix(self) -> Tensor:
        """What Newton's matrix has beside its diagonal."""
        return torch.baddbmm(self.gauge, self.plan, self.conditional.mT, alpha=-1)


class _ToItself:
    """Q as a function of h."""

    limited = True  # no step is longer than one epsilon: beyond that exp outruns its tangent

    def __init__(self, cost: Tensor, epsilon: Tensor) -> None:
        self.cost, self.plan = cost / epsilon[:, None, None], cost

    def rows(self, potential: Tensor) -> Tensor:
        """``Q 1`` for h in units of epsilon, both ``(B, M, 1)``."""
        self.plan = (potential + potential.mT - self.cost).exp()
        return self.plan.sum(-1, keepdim=True)

    def matrix(self) -> Tensor:
        """What Newton's matrix has beside its diagonal."""
        return self.plan


class _Ascended(NamedTuple):
    potential: Tensor  # (K, B, M)
    error: Tensor  # (K, B)
    iterations: Tensor  # (K, B)


def _ascend(
    kinds: Sequence[_ToNodes | _ToItself],
    potentials: list[Tensor],
    epsilon: Tensor,
    masses: Tensor,
    tolerance: Tensor | float,
) -> _Ascended:
    """The maxima of K concave functions of potentials ``(B, M)``, by Newton steps that are shortened until they climb.

    The host looks at what a device has found once in a few iterations; until then a problem that is solved is left alone.
    """
    level, masses = epsilon[:, None, None], masses.unsqueeze(-1)
    target = torch.as_tensor(tolerance, dtype=epsilon.dtype, device=epsilon.device).clamp_min(ROUNDING).view(-1, 1, 1)
    trial = base = torch.stack(potentials).unsqueeze(-1) / level  # (K, B, M, 1)
    limited = sent([kind.limited for kind in kinds], epsilon.device, epsilon.dtype).view(-1, 1, 1, 1)
    damped = masses * (1 - limited)
    # Where a plan is nearly a matching, and for a node without mass, this keeps 0 / 0 away.
    least = torch.stack([(masses <= 0).to(masses) if kind.limited else MATCHING * masses for kind in kinds])
    half: Tensor | float = math.inf  # of the error at the base
    damping = epsilon.new_full((), DAMPING)
    none = refused = iterations = torch.zeros((), dtype=torch.long, device=epsilon.device)
    between = looks_every(epsilon.device)
    for iteration in range(MAX_ITERATIONS + 1):
        rows = torch.stack([kind.rows(potential) for kind, potential in zip(kinds, trial.unbind(), strict=True)])
        slack = masses - rows
        error = torch.linalg.vector_norm(slack, 1, -2, keepdim=True)  # (K, B, 1, 1)
        settled = error <= target
        # A step is kept if it halves the error, or if the concave objective still rises where it ends.
        kept = (error <= half) | ((slack * (trial - base)).sum(-2, keepdim=True) >= 0)
        look, smooth, ended = (iteration + 1) % between == 0, False, False
        if look:  # mostly all are kept, as the host learns in the same breath
            ended, smooth = torch.stack([settled.all(), kept.all()]).tolist()
        if smooth:
            refused = none
        else:
            refused = (refused + 1) * ~kept
            settled = settled | (refused > _HOPELESS)
            ended = look and bool(settled.all())
        if ended or iteration == MAX_ITERATIONS:
            break
        matrix = torch.stack([kind.matrix() for kind in kinds])
        diagonal = torch.addcmul(rows + least, damped, damping * error)
        matrix.diagonal(dim1=-2, dim2=-1).add_(diagonal.squeeze(-1))
        factor, exists = definite.factor(matrix)
        step = definite.solve(factor, slack)
        step = step / (limited * torch.linalg.vector_norm(step, math.inf, -2, keepdim=True)).clamp_min(1.0)
        following = torch.where(exists[..., None, None], trial + step, trial)  # rounding may have made one indefinite
        if smooth:
            base, half, damping = trial, error / 2, 0.3 * damping
        else:
            following = torch.where(kept, following, base.lerp(trial, 0.25))
            base, half = torch.where(kept, trial, base), torch.where(kept, error / 2, half)
            damping = torch.where(kept, 0.3 * damping, 10.0 * damping)
        trial = torch.where(settled, trial, following)
        iterations = iterations + ~settled
    return _Ascended((trial * level).squeeze(-1), error.flatten(1), iterations.expand_as(error).flatten(1))


def _cold_start(cost: Tensor, point_masses: Tensor, masses: Tensor, epsilon: Tensor) -> tuple[Tensor, Tensor]:
    """A potential to start from where nothing is known, ``(B, M)``, and the iterations that it cost, ``(B,)``.

    Epsilon comes down in stages from the size of the cost, since Newton started at a small epsilon sees a flat
    objective.
    """
    potential = (cost * masses.unsqueeze(-2)).sum(-1)
    iterations = torch.zeros_like(epsilon, dtype=torch.long)
    stage, loose = cost.abs().amax((-1, -2)) / 4, min(LOOSE, MISPLACED / point_masses.shape[-1])
    farthest = float((stage / epsilon).nan_to_num(0.0, 0.0, 0.0).max()) if len(stage) else 0.0
    for _ in range(min(MOST_STAGES, 1 + int(math.log(max(farthest, 1.0)) / -math.log(STAGE)))):
        above = stage > epsilon
        level, target = torch.where(above, stage, epsilon), torch.where(above, loose, torch.inf)
        found = solve(cost, point_masses, masses, level, potential, target)
        potential = torch.where(above.unsqueeze(-1), found.potential, potential)
        iterations, stage = iterations + found.iterations, STAGE * stage
    return potential, iterations


def schur(plan: Tensor, conditional: Tensor) -> Tensor:
    """``diag(P 1) - A diag(b) A^T``, the matrix of all linear systems with the plan, ``(B, M, M)``, made invertible.

    It vanishes on the constants, which change no plan; the added constant decides those. Where the plan is nearly a
    matching it vanishes altogether, and so do the right-hand sides; the small diagonal keeps 0 / 0 away.
    """
    matrix = torch.baddbmm(plan.new_full((), 1.0 / plan.shape[-2] ** 2), plan, conditional.mT, alpha=-1)
    matrix.diagonal(dim1=-2, dim2=-1).add_(plan.sum(-1), alpha=1 + MATCHING)
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
    potential = _self_start(masses, epsilon)
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
    kind = _ToItself(cost, epsilon)
    potential = _self_start(masses, epsilon) if potential is None else potential
    found = _ascend([kind], [potential], epsilon, masses, tolerance)
    return SelfTransport(found.potential[0], kind.plan, found.error[0])


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
        factor, _ = definite.factor(schur(solved.plan, solved.conditional))
        ctx.save_for_backward(cost, epsilon, solved.conditional, solved.plan, factor)
        return solved.plan.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        cost, epsilon, conditional, plan, factor = ctx.saved_tensors
        columns = (conditional * upstream).sum(-2)  # (B, N), T^T 1 / b
        right = (plan * (upstream - columns.unsqueeze(-2))).sum(-1)
        first = definite.solve(factor, right.unsqueeze(-1)).squeeze(-1)  # (B, M), lambda
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
        factor, _ = definite.factor(torch.diag_embed(masses) + solved.plan)
        ctx.save_for_backward(cost, epsilon, solved.plan, factor)
        return solved.plan.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        cost, epsilon, plan, factor = ctx.saved_tensors
        weighted = plan * upstream
        right = weighted.sum(-1) + weighted.sum(-2)
        multiplier = definite.solve(factor, right.unsqueeze(-1)).squeeze(-1)  # (B, M)
        to_cost = (plan * multiplier.unsqueeze(-1) - weighted) / epsilon[:, None, None]
        return to_cost, multiplier, -(to_cost * cost).sum((-1, -2)) / epsilon, None


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
