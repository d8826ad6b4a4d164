"""Transport between the points and the nodes: Newton's method on the M unknowns of the semi-dual.

The same iteration as :func:`flowpool.core.sinkhorn.solve`, with one exponential per entry and call:
``K_ij = exp((f_i - |x_i|^2 + 2 x_i.y_j) / epsilon - max_i)`` is formed once, and the iterations move scalings u of its rows,
``A_ij = u_i K_ij / sum_i u_i K_ij``. The part of C that depends on j alone drops out of A.
"""

from __future__ import annotations

import math

from flowpool.core.constants import DAMPING, LOOSE, MATCHING, MAX_ITERATIONS, MISPLACED, ROUNDING, STAGE
from flowpool.kernels.machine.jit import kernel, shared
from flowpool.kernels.machine.lanes import (
    WIDTH,
    divide,
    exponential,
    fma,
    larger,
    load,
    multiply,
    splat,
    store,
    subtract,
)
from flowpool.kernels.machine.linear import factorise, padded, row_products, row_total, substitute
from flowpool.kernels.machine.rows import stay_apart
from flowpool.kernels.machine.vectors import combine, copy, fill, largest

STALLED = 1e-11  # marginal error below which an iteration that does not halve it has met rounding
HOPELESS = 1e8  # damping at which Newton has stopped moving
SERVED = 0.01  # factor by which an iteration must reduce the error for the next one to use the same matrix
FARTHEST = 200.0  # largest logarithm of a scaling before it is absorbed into the potential


@kernel
def scale_rows(points, dimension, count, potential, epsilon, scaled):  # type: ignore[no-untyped-def]
    """Fills ``scaled``, ``(M, Q + 1)``: ``2 x_i / epsilon`` and, last, ``(f_i - |x_i|^2) / epsilon``."""
    stay_apart()
    for i in range(count):
        square = 0.0
        for e in range(dimension):
            square += points[i, e] * points[i, e]
            scaled[i, e] = 2.0 / epsilon * points[i, e]
        scaled[i, dimension] = (potential[0, i] - square) / epsilon


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


@kernel
def gibbs(nodes, length, hull, dimension, count, scaled, gibbs_rows, tops):  # type: ignore[no-untyped-def]
    """Fills K, ``(M, N)``, each column with largest entry one, and the logarithms of what they were divided by."""
    stay_apart()
    for j in range(0, length, WIDTH):
        affine(nodes, hull, dimension, count, scaled, gibbs_rows, j)
        top = splat(-math.inf)
        for i in range(count):
            top = larger(top, load(gibbs_rows, i, j))
        store(tops, 0, j, top)
        for i in range(count):
            store(gibbs_rows, i, j, exponential(subtract(load(gibbs_rows, i, j), top)))


@kernel
def marginals(masses, length, count, gibbs_rows, scaling, sums, conditional, plan, rows):  # type: ignore[no-untyped-def]
    """Fills A, P, the column sums of the scaled K and the row sums of P."""
    stay_apart()
    for j in range(0, length, WIDTH):
        column = splat(0.0)
        for i in range(count):
            column = fma(splat(scaling[0, i]), load(gibbs_rows, i, j), column)
        store(sums, 0, j, column)
        inverse = divide(splat(1.0), column)
        mass = load(masses, 0, j)
        for i in range(count):
            value = multiply(multiply(splat(scaling[0, i]), load(gibbs_rows, i, j)), inverse)
            store(conditional, i, j, value)
            store(plan, i, j, multiply(mass, value))
    for i in range(count):
        rows[0, i] = row_total(plan, i, length)


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
def propose(count, point_masses, rows, overlap, ridge, small, inverse, right, step):  # type: ignore[no-untyped-def]
    """Whether Newton's step on the semi-dual could be found; otherwise ``step`` is Sinkhorn's. Both in units of epsilon.

    Args:
        overlap: P A^T.
        ridge: damping, in units of the masses.
    """
    stay_apart()
    schur_matrix(count, overlap, rows, small)
    for i in range(count):
        small[i, i] += ridge * point_masses[0, i]
    if factorise(small, count, inverse):
        combine(point_masses, -1.0, rows, right, padded(count))
        substitute(small, count, inverse, right, step, 0)
        return True
    for i in range(count):
        step[0, i] = math.log(point_masses[0, i] / max(rows[0, i], 1e-300))
    return False


@kernel
def solve_transport(graph, points, potential, epsilon, stage, tolerance):  # type: ignore[no-untyped-def]
    """Marginal error reached; ``potential`` and the plans of ``graph`` are brought up to date.

    Args:
        points: X, ``(M, Q)``.
        potential: f, ``(1, M)``.
        stage: epsilon to start from; more than ``epsilon`` only for a cold start.
        tolerance: on ``|P 1 - a|_1``.
    """
    stay_apart()
    nodes, masses, point_masses = graph.nodes, graph.masses, graph.point_masses
    count, length, hull, dimension = graph.count, graph.length, graph.hull, graph.dimension
    target = max(tolerance, ROUNDING)
    damping = DAMPING
    end = padded(count)
    fresh = True  # K has to be formed
    served = False  # the factor of the last iteration was good enough to be used again
    error = math.inf
    iterations = 0  # of this stage
    while iterations < MAX_ITERATIONS:
        iterations += 1
        if fresh:
            scale_rows(points, dimension, count, potential, stage, graph.scaled)
            gibbs(nodes, length, hull, dimension, count, graph.scaled, graph.gibbs, graph.old_sums)
            fill(graph.scaling, 1.0, end)
            fill(graph.shift, 0.0, end)
            fill(graph.step, 0.0, end)
            marginals(
                masses, length, count, graph.gibbs, graph.scaling, graph.sums, graph.conditional, graph.plan, graph.rows
            )
            error = marginal_error(point_masses, graph.rows, count)
            fresh = served = False
        if not error < math.inf or damping > HOPELESS:
            break
        if error <= target and stage <= epsilon:
            break
        if stage > epsilon and error <= min(LOOSE, MISPLACED / count):
            combine(potential, stage, graph.shift, potential, end)
            stage = max(STAGE * stage, epsilon)
            fresh = True
            iterations = 0
            continue

        newton = served
        if served:
            combine(point_masses, -1.0, graph.rows, graph.small_right, end)
            substitute(graph.small, count, graph.inverse, graph.small_right, graph.step, 0)
        else:
            row_products(graph.plan, count, graph.conditional, 0, count, length, graph.overlap, True)
            newton = propose(
                count, point_masses, graph.rows, graph.overlap, damping * error, graph.small, graph.inverse,
                graph.small_right, graph.step,
            )  # fmt: skip
        combine(graph.shift, 1.0, graph.step, graph.trial_shift, end)
        if largest(graph.step, count) > FARTHEST:
            damping *= 10.0
            served = False
            continue
        if largest(graph.trial_shift, count) > FARTHEST:
            # The scalings would leave the range of numbers: absorb them into the potential and form K again.
            combine(potential, stage, graph.shift, potential, end)
            fresh = True
            continue
        copy(graph.scaling, graph.old_scaling, end)
        for i in range(0, end, WIDTH):
            store(graph.scaling, 0, i, exponential(load(graph.trial_shift, 0, i)))
        copy(graph.sums, graph.old_sums, length)
        marginals(
            masses, length, count, graph.gibbs, graph.scaling, graph.sums, graph.conditional, graph.plan, graph.rows
        )
        trial = marginal_error(point_masses, graph.rows, count)
        better = trial <= error / 2
        served = newton and trial <= SERVED * error
        if not better:
            if error < STALLED:
                # Neither the error nor the objective says anything any more; the smaller error is kept below.
                better = trial < error
                damping = 10.0 * HOPELESS
            else:
                change = 0.0
                for i in range(count):
                    change += point_masses[0, i] * graph.step[0, i]
                for j in range(length):
                    if masses[0, j] > 0.0:
                        change -= masses[0, j] * math.log(graph.sums[0, j] / graph.old_sums[0, j])
                better = change >= 0.0
        if better:
            copy(graph.trial_shift, graph.shift, end)
            error = trial
            damping *= 0.3
        else:
            copy(graph.old_scaling, graph.scaling, end)
            marginals(
                masses, length, count, graph.gibbs, graph.scaling, graph.sums, graph.conditional, graph.plan, graph.rows
            )
            damping *= 10.0
    combine(potential, stage, graph.shift, potential, end)
    return error
