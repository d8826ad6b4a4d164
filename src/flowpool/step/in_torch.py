r"""What each point receives, and the way back, in plain torch: the specification, and what a device runs.

Nothing waits for a device, and no shape depends on values. A node at :math:`u_j` from the mean of its graph, with mass
:math:`b_j`, goes to the points in portions :math:`A_{ij} = \mathrm{softmax}_i(s_{ij} + f_i)`. With :math:`P_{ij} = b_j A_{ij}`,

.. math::
    r_i = \sum_j P_{ij}, \qquad \mu_i = \frac1{r_i} \sum_j P_{ij} u_j, \qquad v_i = \frac1{r_i} \sum_j P_{ij} (u_j - \mu_i)^2
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowpool.core.constants import (
    BALANCED,
    COOLING,
    DEFINITE,
    HALFWAY,
    MOST_STEPS,
    NEXT_TO_NOTHING,
    SPREADLESS,
    UNBALANCED,
    WIDE,
)
from flowpool.inputs import may_look
from flowpool.status import Status

FEW_STEPS = 8  # of Newton's method where nobody may look how far it is, and the reference lies well inside the nodes;
MORE_STEPS = 30  # and where it may be anywhere
FREE, RELATIVE, MOVED, ROOTS = 1, 2, 4, 8  # switches


def tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """On the errors of the shares: what is aimed at, and what is said to have failed."""
    return (BALANCED, UNBALANCED) if dtype == torch.float64 else (1e-6, 1e-5)


def sums(values: Tensor, graph: Tensor, num_graphs: int) -> Tensor:
    """Of a value per node ``(N, ...)`` over each graph, ``(B, ...)``."""
    return values.new_zeros((num_graphs, *values.shape[1:])).index_add_(0, graph, values)


def survey(nodes: Tensor, masses: Tensor | None, graph: Tensor, num_graphs: int, limit: float) -> tuple[Tensor, Tensor]:
    """Statuses of the graphs ``(B,)``, and number, mean and variance of the nodes that count in statistics, ``(3, D)``.

    Graphs without nodes are empty; those with a feature that is not a number, infinite or above a limit cannot be used.
    """
    most = nodes.abs().amax(1)  # (N,)
    kind = torch.where(most <= limit, 1, torch.where(most.isfinite(), 2, 3))
    worst = kind.new_zeros(num_graphs).scatter_reduce(0, graph, kind, "amax")
    broken = torch.where(worst == 2, Status.NONFINITE.value, Status.NONFINITE_INPUT.value)
    status = torch.where(worst == 0, Status.EMPTY.value, torch.where(worst == 1, Status.OK.value, broken))
    counts = worst[graph] == 1
    counts = (counts if masses is None else counts & (masses > 0)).unsqueeze(-1)
    number = counts.sum().to(nodes.dtype)
    mean = torch.where(counts, nodes, 0.0).sum(0) / number.clamp(min=1)
    variance = torch.where(counts, nodes - mean, 0.0).square().sum(0) / number.clamp(min=1)
    return status.to(torch.int8), torch.stack([number.expand_as(mean), mean, variance])


class Frame(NamedTuple):
    """Graphs seen from their means, and how scores depend on them."""

    nodes: Tensor  # u, (N, D)
    masses: Tensor  # b, (N, 1)
    total: Tensor  # sum of the masses as given, (B, 1)
    mean: Tensor  # (B, D)
    origin: Tensor  # where the reference has its zero, as seen from the mean, (B, D) or 0
    squares: Tensor  # mean of u^2, (B, D)
    radius: Tensor  # R, (B, 1); like the next one where units are those of the graph, else one
    cost: Tensor  # mean cost to the mean, (B, 1)
    framed: Tensor  # whether units are those of the graph, (B, 1)
    slope: Tensor  # 2 R / (epsilon V), (B, 1)
    square: Tensor  # R^2 / (epsilon V), (B, 1)


def frame_of(
    nodes: Tensor, masses: Tensor | None, epsilon: Tensor, table: Tensor, graph: Tensor, switches: int
) -> Frame:
    middle, factor, bias, weights, _ = table
    graphs = len(epsilon)
    placed = (nodes - middle) * factor + bias
    given = torch.ones_like(placed[:, :1]) if masses is None else masses.unsqueeze(-1)
    total = sums(given, graph, graphs)
    own = given / total[graph]
    mean = sums(own * placed, graph, graphs)
    around = placed - mean[graph]
    squares = sums(own * around.square(), graph, graphs)
    squares = torch.where(squares <= SPREADLESS * mean.square(), 0.0, squares)
    one = torch.ones_like(total)
    radius = cost = one
    framed = one < 0
    if switches & RELATIVE:
        square = squares.sum(-1, keepdim=True)
        framed = square > 0  # otherwise the graph is one point or none, and every unit is as good
        radius = torch.where(framed, square, 1.0).sqrt()
        cost = torch.where(framed, (squares * weights).sum(-1, keepdim=True), 1.0)
    unit = radius / (epsilon.unsqueeze(-1) * cost)
    origin = torch.zeros_like(mean) if switches & RELATIVE else -mean
    return Frame(around, own, total, mean, origin, squares, radius, cost, framed, 2 * unit, radius * unit)


def scores_of(frame: Frame, reference: Tensor, shares: Tensor, weights: Tensor, graph: Tensor, switches: int) -> Tensor:
    """-C / epsilon between points and nodes, ``(N, M)``, up to a number per node; and log a with free masses."""
    nearby = reference - reference.mean(0)
    scores = frame.slope[graph] * (frame.nodes @ (weights * nearby).mT)
    if not switches & FREE:
        return scores
    # From |x - y|^2 = |x|^2 - 2 x.y, with both as seen from the middle of the points.
    from_mean = -frame.origin - reference.mean(0)
    constant = (2 * from_mean @ (weights * nearby).mT) - (weights * nearby.square()).sum(-1)
    return scores + (frame.square * constant + shares.log())[graph]


def share_out(
    scores: Tensor, masses: Tensor, shares: Tensor, graph: Tensor, num_graphs: int, few: int
) -> tuple[Tensor, Tensor]:
    """A ``(N, M)`` for which each point receives its share, and the largest relative error that is left, ``(B,)``.

    By Newton's method. The third derivative along a direction is bounded by the second times the range of the
    direction, so log(1 + range) / range of Newton's step always ascends (Sun and Tran-Dinh, 2019) and nothing has to be
    searched. Such steps are short where epsilon is small: it is then lowered bit by bit. On a device a few steps must do.

    Args:
        masses: ``(N, 1)``.
    """
    looks = may_look(scores)
    widest = sums_like_max(scores.amax(-1) - scores.amin(-1), graph, num_graphs)  # (B, 1)
    heat = torch.where(widest > WIDE, widest / WIDE, 1.0)
    filled = sums(masses, graph, num_graphs) > 0
    received = sums(masses * (scores / heat[graph]).softmax(-1), graph, num_graphs)
    potential = torch.where(filled, (shares / received).log(), 0.0)
    for _ in range(MOST_STEPS if looks else few):
        portions = (scores / heat[graph] + potential[graph]).softmax(-1)
        received = sums(masses * portions, graph, num_graphs)
        error = torch.where(filled, received / shares - 1, 0.0).abs().amax(-1, keepdim=True)  # (B, 1)
        going = error > torch.where(heat > 1, HALFWAY, tolerances(scores.dtype)[0])  # that of NaN never is
        if looks and not bool((going | (heat > 1)).any()):
            break
        change = newton_step(portions, masses, shares - received, received, graph)
        width = change.amax(-1, keepdim=True) - change.amin(-1, keepdim=True) + NEXT_TO_NOTHING
        change = torch.where(width > 1, change * width.log1p() / width, change)
        cooler = (heat / COOLING).clamp(min=1)
        potential = torch.where(going, potential + change, potential * heat / cooler)
        heat = torch.where(going, heat, cooler)
    return portions, error.squeeze(-1)


def sums_like_max(values: Tensor, graph: Tensor, num_graphs: int) -> Tensor:
    """The largest of a value per node ``(N,)``, ``(B, 1)``; zero for a graph without nodes."""
    return values.new_zeros(num_graphs).scatter_reduce(0, graph, values, "amax").unsqueeze(-1)


def newton_step(portions: Tensor, masses: Tensor, missing: Tensor, received: Tensor, graph: Tensor) -> Tensor:
    """Solution, ``(B, M)``, of the system with minus the Hessian of the semi-dual, ``diag(r) - A diag(b) A^T``."""
    graphs, points = missing.shape
    shared = sums((masses * portions).unsqueeze(-1) * portions.unsqueeze(-2), graph, graphs)
    identity = torch.eye(points, dtype=portions.dtype, device=portions.device)
    # What stands on the diagonal is the sum of the rest of its row: no rounding can make this indefinite.
    shared = shared * (1 - identity)
    # The constant is free and changes nothing; the outer product ties it down.
    tied = received.unsqueeze(-1) * received.unsqueeze(-2) + DEFINITE * identity
    hessian = torch.diag_embed(shared.sum(-1)) - shared + tied
    return torch.cholesky_solve(missing.unsqueeze(-1), torch.linalg.cholesky_ex(hessian).L).squeeze(-1)


def receive(
    nodes: Tensor, masses: Tensor | None, reference: Tensor, shares: Tensor, epsilon: Tensor, table: Tensor, graph: Tensor,
    status: Tensor, switches: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Rows, what is kept for the way back (mu, v and r of each graph, and A), statuses and errors of the shares.

    A row is mu, v, the sum of the nodes and their number, ``(2 M D + D + 1,)``.
    """
    unusable = (status != Status.OK.value) & (status != Status.EMPTY.value)
    nodes = torch.where(unusable[graph].unsqueeze(-1), 0.0, nodes)
    frame = frame_of(nodes, masses, epsilon, table, graph, switches)
    scores = scores_of(frame, reference, shares, table[3], graph, switches)
    graphs = len(epsilon)
    if switches & FREE:
        portions, error = scores.softmax(-1), torch.zeros_like(epsilon)
    else:
        few = FEW_STEPS if switches & MOVED else MORE_STEPS
        portions, error = share_out(scores, frame.masses, shares, graph, graphs, few)
    plan = frame.masses * portions  # (N, M)
    received = sums(plan, graph, graphs).unsqueeze(-1)  # (B, M, 1)
    # Next to nothing lies at every point from the start, so that there is a mean where nothing comes.
    whole = received + NEXT_TO_NOTHING
    start = frame.radius.unsqueeze(-1) * reference + frame.origin.unsqueeze(1)
    mean = (sums(plan.unsqueeze(-1) * frame.nodes.unsqueeze(1), graph, graphs) + NEXT_TO_NOTHING * start) / whole
    away = frame.nodes.unsqueeze(1) - mean[graph]  # (N, M, D)
    variance = sums(plan.unsqueeze(-1) * away.square(), graph, graphs) / whole
    points = mean + frame.mean.unsqueeze(1)
    size = mean.abs() + frame.mean.abs().unsqueeze(1)
    variance = torch.where(variance <= SPREADLESS * size.square(), 0.0, variance)
    told = points - reference if switches & MOVED else points
    spread = variance.sqrt() if switches & ROOTS else variance
    rows = torch.cat([told.flatten(1), spread.flatten(1), frame.total * frame.mean, frame.total], 1)
    overflowed = ~(0.0 * rows).sum(-1).isfinite()
    status = torch.where(~unusable & (error > tolerances(error.dtype)[1]), Status.MAX_STEPS.value, status)
    status = torch.where(~unusable & overflowed, Status.NONFINITE.value, status)
    bad = (unusable | overflowed).unsqueeze(-1)
    found = torch.cat([mean.flatten(1), spread.flatten(1), received.flatten(1)], 1)
    error = torch.where(unusable, torch.nan, error)
    return torch.where(bad, torch.nan, rows), torch.where(bad, torch.nan, found), portions, status, error


def adjoint(
    nodes: Tensor, masses: Tensor | None, reference: Tensor, shares: Tensor, epsilon: Tensor, table: Tensor, graph: Tensor,
    switches: int, found: Tensor, portions: Tensor, upstream: Tensor, upstream_masses: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients in nodes and masses, and of each graph in reference, shares, weights, norm (factors, biases) and epsilon."""
    graphs, (points, dim) = len(epsilon), reference.shape
    bad = found[:, :1].isnan()
    found, upstream = torch.where(bad, 0.0, found), torch.where(bad, 0.0, upstream)
    upstream_masses = torch.where(bad, 0.0, upstream_masses)
    skipped = bad[graph]
    nodes = torch.where(skipped, 0.0, nodes)
    middle, factor, _, weights, _ = table
    frame = frame_of(nodes, masses, epsilon, table, graph, switches)
    mean, variance, received = found.split([points * dim, points * dim, points], 1)
    mean, variance = mean.view(graphs, points, dim), variance.view(graphs, points, dim)
    to_mean, to_spread, to_sum, to_size = upstream.split([points * dim, points * dim, dim, 1], 1)
    to_mean, to_spread = to_mean.view(graphs, points, dim), to_spread.view(graphs, points, dim)
    whole = received.unsqueeze(-1) + NEXT_TO_NOTHING
    place = NEXT_TO_NOTHING / whole
    if switches & ROOTS:  # of what is zero, at the tip of a cone, the slope is that of the axis
        to_spread = torch.where(variance > 0, 0.5 * to_spread / variance, 0.0)
        variance = variance.square()
    direct, bent = to_mean / whole, 2 * to_spread / whole  # of a node that comes to a point, by the plan

    # The derivative in P, then that in the scores: through the softmax, and through the potentials that keep the shares.
    plan = frame.masses * portions
    away = frame.nodes.unsqueeze(1) - mean[graph]  # (N, M, D)
    pull = (away * (direct[graph] + 0.5 * away * bent[graph])).sum(-1)
    pull = pull + (upstream_masses - 0.5 * (bent * variance).sum(-1))[graph]
    common = (portions * pull).sum(-1, keepdim=True)
    to_scores, to_own = plan * (pull - common), common  # to_own: in the normalised masses, (N, 1)
    answer = sums(to_scores, graph, graphs)  # (B, M)
    if not switches & FREE:
        answer = newton_step(portions, frame.masses, answer, received, graph)
        common = (portions * answer[graph]).sum(-1, keepdim=True)
        to_scores, to_own = to_scores - plan * (answer[graph] - common), to_own - common

    # Scores are slope * <w x, u>, and with free masses square * -|x - origin|_w^2 as well.
    nearby = reference - reference.mean(0)
    pulled = sums(to_scores.unsqueeze(-1) * frame.nodes.unsqueeze(1), graph, graphs)  # (B, M, D)
    slope, square = frame.slope.unsqueeze(-1), frame.square.unsqueeze(-1)
    push = answer.unsqueeze(-1) if switches & FREE else torch.zeros_like(answer).unsqueeze(-1)
    apart = reference + frame.origin.unsqueeze(1)
    in_point = slope * pulled - 2 * square * push * apart
    start = place * frame.radius.unsqueeze(-1) * to_mean
    to_reference = weights * in_point + start - (to_mean if switches & MOVED else 0.0)
    to_weights = (slope * nearby * pulled - square * push * apart.square()).sum(1)
    by_slope = (slope * weights * nearby * pulled).sum((1, 2)).unsqueeze(-1)
    by_square = -(square * weights * push * apart.square()).sum((1, 2)).unsqueeze(-1)
    to_epsilon = -(by_slope + by_square).squeeze(-1) / epsilon

    # How the units, and the mean that all is seen from, depend on the nodes.
    by_radius = by_slope + 2 * by_square + (start * reference).sum((1, 2)).unsqueeze(-1)
    by_cost = torch.where(frame.framed, -(by_slope + by_square) / frame.cost, 0.0)
    to_squares = torch.where(frame.framed, 0.5 * by_radius / frame.radius.square(), 0.0) + by_cost * weights  # (B, D)
    to_weights = to_weights + by_cost * frame.squares
    to_centre = to_mean.sum(1)
    if not switches & RELATIVE:
        to_centre = to_centre - (place * to_mean).sum(1) + (2 * square * weights * push * apart).sum(1)
    bend = to_squares[graph] * frame.nodes
    to_around = (plan.unsqueeze(-1) * (direct[graph] + bent[graph] * away)).sum(1) + 2 * frame.masses * bend
    to_around = to_around + frame.slope[graph] * (to_scores @ (weights * nearby))
    rest = to_centre - sums(to_around, graph, graphs)
    to_placed = to_around + frame.masses * (rest + frame.total * to_sum)[graph]
    to_own = to_own + (bend * frame.nodes + rest[graph] * frame.nodes).sum(-1, keepdim=True)
    to_own = (to_own - sums(frame.masses * to_own, graph, graphs)[graph]) / frame.total[graph]
    to_masses = (
        to_own.squeeze(-1) + ((frame.nodes + frame.mean[graph]) * to_sum[graph]).sum(-1) + to_size[graph].squeeze(-1)
    )
    to_shares = answer / shares if switches & FREE else answer
    to_placed = torch.where(skipped, 0.0, to_placed)
    shared = [
        to_reference.flatten(1), to_shares, to_weights, sums(to_placed * (nodes - middle), graph, graphs),
        sums(to_placed, graph, graphs), to_epsilon.unsqueeze(-1),
    ]  # fmt: skip
    return to_placed * factor, torch.where(skipped.squeeze(-1), 0.0, to_masses), torch.cat(shared, 1)


def less(
    gradient: Tensor, nodes: Tensor, masses: Tensor | None, graph: Tensor, status: Tensor, table: Tensor, total: Tensor,
    statistics: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient in the nodes less what the mean and the variance of a batch take of it.

    Args:
        total: sums of the gradient in the normed nodes, and of that times the nodes less their mean, ``(2 D,)``.
    """
    number, (middle, factor, _, _, inverse) = statistics[0], table
    counts = status[graph] == Status.OK.value
    if masses is not None:
        counts = counts & (masses > 0)
    by_bias, by_factor = factor * (number >= 2) / number.clamp(min=1) * total.view(2, -1)
    away = by_bias + by_factor * inverse.square() * (nodes - middle)
    return gradient - torch.where(counts.unsqueeze(-1), away, 0.0).to(gradient.dtype)
