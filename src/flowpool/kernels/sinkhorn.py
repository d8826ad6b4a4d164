"""Transport between the points and the nodes: Newton's method on the M unknowns of the semi-dual.

The same iteration as :func:`flowpool.core.sinkhorn.solve`, with one exponential per entry and call:
``K_ij = exp((f_i - |x_i|^2 + 2 x_i.y_j) / epsilon - max_i)`` is formed once, and the iterations move scalings u of its rows,
``A_ij = u_i K_ij / sum_i u_i K_ij``. The part of C that depends on j alone drops out of A.
"""

from __future__ import annotations

import math

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
    spread,
    store,
    subtract,
)
from flowpool.kernels.machine.linear import factorise, padded, row_products, row_total, substitute
from flowpool.kernels.machine.rows import stay_apart
from flowpool.kernels.machine.vectors import combine, copy, fill, largest

MAX_ITERATIONS = 200
LOOSE = 0.03  # marginal error at which a stage of the cold start is good enough
STAGE = 0.3  # factor between two stages of the cold start
ROUNDING = 2e-14  # marginal error that float64 sums cannot get below
MATCHING = 1e-13  # share of a point's mass below which what it gives to a second node is rounding
NOISE = 1e-11  # marginal error below which an iteration that does not halve it has met rounding
HOPELESS = 1e8  # damping at which Newton has stopped moving
SERVED = 0.01  # factor by which an iteration must reduce the error for the next one to use the same matrix
FARTHEST = 200.0  # largest logarithm of a scaling before it is absorbed into the potential


@kernel
def scale_rows(dimension, points, count, potential, epsilon, scaled):  # type: ignore[no-untyped-def]
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
    """``result_ij = scaled_iQ + sum_e scaled_ie y_je`` for the nodes that are taken at a time from j on, in either precision."""
    last = count // 4 * 4
    for i in range(0, last, 4):
        first = spread(result, scaled[i, dimension])
        second = spread(result, scaled[i + 1, dimension])
        third = spread(result, scaled[i + 2, dimension])
        fourth = spread(result, scaled[i + 3, dimension])
        for e in range(hull):
            value = load(nodes, e + 1, j)
            first = fma(spread(result, scaled[i, e]), value, first)
            second = fma(spread(result, scaled[i + 1, e]), value, second)
            third = fma(spread(result, scaled[i + 2, e]), value, third)
            fourth = fma(spread(result, scaled[i + 3, e]), value, fourth)
        store(result, i, j, first)
        store(result, i + 1, j, second)
        store(result, i + 2, j, third)
        store(result, i + 3, j, fourth)
    for i in range(last, count):
        first = spread(result, scaled[i, dimension])
        for e in range(hull):
            first = fma(spread(result, scaled[i, e]), load(nodes, e + 1, j), first)
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
def solve_transport(  # type: ignore[no-untyped-def]
    nodes, masses, length, hull, dimension, points, count, point_masses, epsilon, potential, stage, tolerance, work
):
    """Marginal error reached; ``potential`` and the rows of ``work`` are brought up to date.

    Args:
        nodes: ``(1 + R, N)``, row 0 is ones, then the coordinates of the nodes in their hull.
        masses: b, ``(1, N)``.
        length: N, padded.
        hull: R.
        dimension: Q >= R, coordinates of the points.
        points: X, ``(M, Q)``.
        point_masses: a, ``(1, M)``.
        potential: f, ``(1, M)``.
        stage: epsilon to start from; more than ``epsilon`` only for a cold start.
        tolerance: on ``|P 1 - a|_1``.
    """
    stay_apart()
    target = max(tolerance, ROUNDING)
    damping = 1e-3
    end = padded(count)
    fresh = True  # K has to be formed
    served = False  # the factor of the last iteration was good enough to be used again
    error = math.inf
    for _ in range(MAX_ITERATIONS):
        if fresh:
            scale_rows(dimension, points, count, potential, stage, work.scaled)
            gibbs(nodes, length, hull, dimension, count, work.scaled, work.gibbs, work.old_sums)
            fill(work.scaling, 1.0, end)
            fill(work.shift, 0.0, end)
            marginals(
                masses, length, count, work.gibbs, work.scaling, work.sums, work.conditional, work.plan, work.rows
            )
            error = marginal_error(point_masses, work.rows, count)
            fresh = served = False
        if not error < math.inf or damping > HOPELESS:
            break
        if error <= target and stage <= epsilon:
            break
        if stage > epsilon and error <= LOOSE:
            combine(potential, stage, work.shift, potential, end)
            stage = max(STAGE * stage, epsilon)
            fresh = True
            continue

        newton = served
        if not served:
            row_products(work.plan, count, work.conditional, 0, count, length, work.overlap, True)
            schur_matrix(count, work.overlap, work.rows, work.small)
            for i in range(count):
                work.small[i, i] += damping * error * point_masses[0, i]
            newton = factorise(work.small, count, work.inverse)
        combine(point_masses, -1.0, work.rows, work.right, end)
        if newton:
            substitute(work.small, count, work.inverse, work.right, work.step, 0)
        else:
            for i in range(count):
                work.step[0, i] = math.log(point_masses[0, i] / max(work.rows[0, i], 1e-300))
        combine(work.shift, 1.0, work.step, work.trial_shift, end)
        if largest(work.step, count) > FARTHEST:
            damping *= 10.0
            served = False
            continue
        if largest(work.trial_shift, count) > FARTHEST:
            # The scalings would leave the range of numbers: absorb them into the potential and form K again.
            combine(potential, stage, work.shift, potential, end)
            fresh = True
            continue
        copy(work.scaling, work.old_scaling, end)
        for i in range(0, end, WIDTH):
            store(work.scaling, 0, i, exponential(load(work.trial_shift, 0, i)))
        copy(work.sums, work.old_sums, length)
        marginals(masses, length, count, work.gibbs, work.scaling, work.sums, work.conditional, work.plan, work.rows)
        trial = marginal_error(point_masses, work.rows, count)
        better = trial <= error / 2
        served = newton and trial <= SERVED * error
        if not better:
            if error < NOISE:
                # Neither the error nor the objective says anything any more; the smaller error is kept below.
                better = trial < error
                damping = 10.0 * HOPELESS
            else:
                change = 0.0
                for i in range(count):
                    change += point_masses[0, i] * work.step[0, i]
                for j in range(length):
                    if masses[0, j] > 0.0:
                        change -= masses[0, j] * math.log(work.sums[0, j] / work.old_sums[0, j])
                better = change >= 0.0
        if better:
            copy(work.trial_shift, work.shift, end)
            error = trial
            damping *= 0.3
        else:
            copy(work.old_scaling, work.scaling, end)
            marginals(
                masses, length, count, work.gibbs, work.scaling, work.sums, work.conditional, work.plan, work.rows
            )
            damping *= 10.0
    combine(potential, stage, work.shift, potential, end)
    return error
