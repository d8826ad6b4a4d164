"""Transport of the points onto themselves: Newton's method on h, as :func:`flowpool.core.sinkhorn.solve_self` does it.

``Q_ik = u_i K_ik u_k`` with ``K_ik = exp((h_i + h_k - |x_i - x_k|^2) / epsilon)`` formed once per call.
"""

from __future__ import annotations

import math

from flowpool.kernels.machine.jit import kernel
from flowpool.kernels.machine.lanes import WIDTH, add, exponential, fma, load, multiply, splat, store, subtract
from flowpool.kernels.machine.linear import factorise, padded, row_total, substitute
from flowpool.kernels.machine.rows import stay_apart
from flowpool.kernels.machine.vectors import combine, copy, fill
from flowpool.kernels.sinkhorn import FARTHEST, MAX_ITERATIONS, ROUNDING, marginal_error

MAX_STALLED = 20


@kernel
def self_plan(count, kernel_rows, scaling, plan, rows):  # type: ignore[no-untyped-def]
    """Fills Q and its row sums; columns beyond M are zero as in the kernel."""
    end = padded(count)
    for i in range(count):
        factor = splat(scaling[0, i])
        for k in range(0, end, WIDTH):
            store(plan, i, k, multiply(multiply(factor, load(scaling, 0, k)), load(kernel_rows, i, k)))
        rows[0, i] = row_total(plan, i, end)


@kernel
def solve_self_transport(points, dimension, count, point_masses, epsilon, potential, tolerance, work):  # type: ignore[no-untyped-def]
    """Marginal error reached; ``potential`` h, Q and its row sums are brought up to date."""
    stay_apart()
    end = padded(count)
    columns, kernel_rows = work.columns, work.self_gibbs
    for k in range(count):
        for e in range(dimension):
            columns[e, k] = points[k, e]
    for i in range(count):
        for k in range(0, end, WIDTH):
            square = splat(0.0)
            for e in range(dimension):
                apart = subtract(splat(points[i, e]), load(columns, e, k))
                square = fma(apart, apart, square)
            height = subtract(add(splat(potential[0, i]), load(potential, 0, k)), square)
            store(kernel_rows, i, k, exponential(multiply(splat(1.0 / epsilon), height)))
        for k in range(count, end):
            kernel_rows[i, k] = 0.0
    fill(work.scaling, 1.0, end)
    fill(work.shift, 0.0, end)
    for i in range(count, end):
        work.step[0, i] = 0.0

    target = max(tolerance, ROUNDING)
    self_plan(count, work.self_gibbs, work.scaling, work.self_plan, work.self_rows)
    error = marginal_error(point_masses, work.self_rows, count)
    stalled = 0
    for _ in range(MAX_ITERATIONS):
        if error <= target or stalled > MAX_STALLED or not error < math.inf:
            break
        for i in range(count):
            for k in range(0, end, WIDTH):
                store(work.small, i, k, load(work.self_plan, i, k))
            work.small[i, i] += work.self_rows[0, i]
        combine(point_masses, -1.0, work.self_rows, work.right, end)
        copy(work.scaling, work.old_scaling, end)
        copy(work.self_rows, work.old_rows, end)
        previous = error
        better = factorise(work.small, count, work.inverse)
        if better:
            substitute(work.small, count, work.inverse, work.right, work.step, 0)
            for i in range(count):
                work.step[0, i] = min(work.step[0, i], FARTHEST)
            for i in range(0, end, WIDTH):
                store(work.scaling, 0, i, multiply(load(work.scaling, 0, i), exponential(load(work.step, 0, i))))
            self_plan(count, work.self_gibbs, work.scaling, work.self_plan, work.self_rows)
            error = marginal_error(point_masses, work.self_rows, count)
            better = error < 0.9 * previous
        if not better:
            for i in range(count):
                work.step[0, i] = 0.5 * math.log(point_masses[0, i] / max(work.old_rows[0, i], 1e-300))
                work.scaling[0, i] = work.old_scaling[0, i] * math.exp(work.step[0, i])
            self_plan(count, work.self_gibbs, work.scaling, work.self_plan, work.self_rows)
            error = marginal_error(point_masses, work.self_rows, count)
        combine(work.shift, 1.0, work.step, work.shift, end)
        stalled = 0 if error < 0.9 * previous else stalled + 1
    combine(potential, epsilon, work.shift, potential, end)
    return error
