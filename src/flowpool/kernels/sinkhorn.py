"""Transport between the points and the nodes: the scores, and the plan that :mod:`flowpool.kernels.transport` finds for them.

``A_ij = softmax_i((f_i - |x_i|^2 + 2 x_i.y_j) / epsilon)``: the part of C that depends on j alone drops out.
"""

from __future__ import annotations

from flowpool.core.constants import MATCHING, ROUNDING
from flowpool.kernels.machine.jit import kernel, shared
from flowpool.kernels.machine.lanes import WIDTH, fma, load, splat, store
from flowpool.kernels.machine.rows import stay_apart
from flowpool.kernels.transport import POTENTIAL, RECEIVED, share_out


@kernel
def scale_rows(points, dimension, count, epsilon, scaled):  # type: ignore[no-untyped-def]
    """Fills ``scaled``, ``(M, Q + 1)``: ``2 x_i / epsilon`` and, last, ``-|x_i|^2 / epsilon``."""
    stay_apart()
    for i in range(count):
        square = 0.0
        for e in range(dimension):
            square += points[i, e] * points[i, e]
            scaled[i, e] = 2.0 / epsilon * points[i, e]
        scaled[i, dimension] = -square / epsilon


@shared
def affine(nodes, hull, dimension, count, scaled, result, j):  # type: ignore[no-untyped-def]
    """``result_ij = scaled_iQ + sum_e scaled_ie y_je`` for the nodes that are taken at a time from j on."""
    last = count // 4 * 4
    for i in range(0, last, 4):
        first = splat(scaled[i, dimension])
        second = splat(scaled[i + 1, dimension])
        third = splat(scaled[i + 2, dimension])
        fourth = splat(scaled[i + 3, dimension])
        for e in range(hull):
            value = load(nodes, e + 1, j)
            first = fma(splat(scaled[i, e]), value, first)
            second = fma(splat(scaled[i + 1, e]), value, second)
            third = fma(splat(scaled[i + 2, e]), value, third)
            fourth = fma(splat(scaled[i + 3, e]), value, fourth)
        store(result, i, j, first)
        store(result, i + 1, j, second)
        store(result, i + 2, j, third)
        store(result, i + 3, j, fourth)
    for i in range(last, count):
        first = splat(scaled[i, dimension])
        for e in range(hull):
            first = fma(splat(scaled[i, e]), load(nodes, e + 1, j), first)
        store(result, i, j, first)


@shared
def marginal_error(point_masses, rows, count):  # type: ignore[no-untyped-def]
    """``|a - P 1|_1``."""
    error = 0.0
    for i in range(count):
        error += abs(point_masses[0, i] - rows[0, i])
    return error


@kernel
def schur_matrix(count, overlap, rows, matrix):  # type: ignore[no-untyped-def]
    """``diag(P 1) - P A^T``, made invertible along the constant potentials that change no plan; ``overlap`` is P A^T."""
    stay_apart()
    gauge = 1.0 / (count * count)
    for i in range(count):
        for k in range(i, count):
            matrix[i, k] = gauge - overlap[i, k]
        matrix[i, i] += (1.0 + MATCHING) * rows[0, i]


@kernel
def solve_transport(graph, points, potential, epsilon, stage, tolerance):  # type: ignore[no-untyped-def]
    """Marginal error reached; ``potential``, the plans of ``graph`` and their row sums are brought up to date.

    Args:
        points: X, ``(M, Q)``.
        potential: f, ``(1, M)``.
        stage: epsilon to start from; more than ``epsilon`` only for a cold start.
        tolerance: on the share of any point.
    """
    stay_apart()
    count, length, work = graph.count, graph.length, graph.work
    scale_rows(points, graph.dimension, count, epsilon, graph.scaled)
    for j in range(0, length, WIDTH):
        affine(graph.nodes, graph.hull, graph.dimension, count, graph.scaled, graph.scores, j)
    for i in range(count):
        work[POTENTIAL, i] = potential[0, i] / stage
    share_out(
        graph.scores, graph.masses, graph.point_masses, count, length, stage / epsilon, max(tolerance, ROUNDING),
        graph.conditional, graph.plan, work,
    )  # fmt: skip
    for i in range(count):
        potential[0, i] = epsilon * work[POTENTIAL, i]
        graph.rows[0, i] = work[RECEIVED, i]
    return marginal_error(graph.point_masses, graph.rows, count)
