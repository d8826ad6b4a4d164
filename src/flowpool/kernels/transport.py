r"""Newton's method on the semi-dual of entropic transport: the potentials for which every point receives its share.

Node j divides its mass among the points by :math:`A_{ij} = \mathrm{softmax}_i(s_{ij} / h + f_i)`, with scores s and a heat
h >= 1 that ends at one. Scores lie point by point, ``(M, N)``, and are filled up to whole lanes with nodes without mass.

A change d of the potentials multiplies A by :math:`e^{d_i}` and norms its columns, so that an iteration takes M exponentials
and not M N of them; and what A says of the shares is not drowned in the rounding of potentials that epsilon makes large.
"""

from __future__ import annotations

import math

from flowpool.core.constants import COOLING, DEFINITE, HALFWAY, MOST_STEPS, REWEIGHED, WIDE
from flowpool.kernels.machine.jit import kernel, shared
from flowpool.kernels.machine.lanes import (
    WIDTH,
    add,
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
from flowpool.kernels.machine.rows import part, stay_apart

SERVED = 0.01  # factor by which a step must reduce the error for the next one to use the same factor
STALLED = 1e-11  # error below which a step that does not halve it has met rounding

# Rows of the workspace, each as long as M filled up to whole lanes; the Hessian stands last.
POTENTIAL, RECEIVED, STEP, FACTORS, SCRATCH, PIVOTS, HESSIAN = range(7)


@shared
def work_rows(count):  # type: ignore[no-untyped-def]
    """How many rows the workspace for ``count`` points has."""
    return HESSIAN + padded(count)


@kernel
def divide_nodes(scores, heat, masses, count, length, portions, plan, work):  # type: ignore[no-untyped-def]
    """Fills A, P and what each point receives, from the potentials."""
    stay_apart()
    scale = splat(1.0 / heat)
    for j in range(0, length, WIDTH):
        top = splat(-math.inf)
        for i in range(count):
            value = fma(scale, load(scores, i, j), splat(work[POTENTIAL, i]))
            store(portions, i, j, value)
            top = larger(value, top)
        column = splat(0.0)
        for i in range(count):
            value = exponential(subtract(load(portions, i, j), top))
            store(portions, i, j, value)
            column = add(column, value)
        inverse = divide(splat(1.0), column)
        weight = multiply(load(masses, 0, j), inverse)
        for i in range(count):
            value = load(portions, i, j)
            store(portions, i, j, multiply(value, inverse))
            store(plan, i, j, multiply(value, weight))
    for i in range(count):
        work[RECEIVED, i] = row_total(plan, i, length)


@kernel
def reweigh_nodes(masses, count, length, portions, plan, work):  # type: ignore[no-untyped-def]
    """The same after each potential has changed by the logarithm of its factor."""
    stay_apart()
    for j in range(0, length, WIDTH):
        column = splat(0.0)
        for i in range(count):
            column = fma(splat(work[FACTORS, i]), load(portions, i, j), column)
        inverse = divide(splat(1.0), column)
        mass = load(masses, 0, j)
        for i in range(count):
            value = multiply(multiply(splat(work[FACTORS, i]), load(portions, i, j)), inverse)
            store(portions, i, j, value)
            store(plan, i, j, multiply(mass, value))
    for i in range(count):
        work[RECEIVED, i] = row_total(plan, i, length)


@kernel
def form_hessian(portions, plan, count, length, work):  # type: ignore[no-untyped-def]
    """Whether minus the Hessian of the semi-dual, ``diag(r) - A diag(b) A^T + r r^T``, could be factorised.

    The last term ties down the constant that potentials are free in, and changes nothing else.
    """
    stay_apart()
    side = padded(count)
    hessian = part(work, HESSIAN * side, side)
    row_products(plan, count, portions, 0, count, length, hessian, True)
    for i in range(count):
        work[SCRATCH, i] = 0.0
    # What stands on the diagonal is the sum of the rest of its row: no rounding can make this indefinite.
    for i in range(count):
        for k in range(i + 1, count):
            work[SCRATCH, i] += hessian[i, k]
            work[SCRATCH, k] += hessian[i, k]
            hessian[i, k] = work[RECEIVED, i] * work[RECEIVED, k] - hessian[i, k]
    for i in range(count):
        hessian[i, i] = work[SCRATCH, i] + work[RECEIVED, i] * work[RECEIVED, i] + DEFINITE
    return factorise(hessian, count, part(work, PIVOTS * side, side))


@kernel
def solve_hessian(count, work):  # type: ignore[no-untyped-def]
    """Solves with the factor of :func:`form_hessian`, in place, for the row STEP."""
    stay_apart()
    side = padded(count)
    hessian, pivots = part(work, HESSIAN * side, side), part(work, PIVOTS * side, side)
    for i in range(count, side):
        work[STEP, i] = 0.0
    substitute(hessian, count, pivots, part(work, STEP * side, side), part(work, SCRATCH * side, side), 0)
    for i in range(count):
        work[STEP, i] = work[SCRATCH, i]


@kernel
def widest_range(scores, count, size):  # type: ignore[no-untyped-def]
    """The largest range among the scores of a node."""
    stay_apart()
    widest = 0.0
    for j in range(size):
        low = high = scores[0, j]
        for i in range(1, count):
            low, high = min(low, scores[i, j]), max(high, scores[i, j])
        widest = max(widest, high - low)
    return widest


@kernel
def worst_share(shares, count, work):  # type: ignore[no-untyped-def]
    """The largest relative error of a share; NaN stays NaN."""
    stay_apart()
    error = 0.0
    for i in range(count):
        one = abs(work[RECEIVED, i] / shares[0, i] - 1.0)
        if math.isnan(one):
            return one
        error = max(error, one)
    return error


@kernel
def ascend(shares, count, length, portions, plan, served, work):  # type: ignore[no-untyped-def]
    """Whether Newton's step was found, for the row STEP, shortened where it is long; otherwise that is Sinkhorn's.

    The third derivative along a direction is bounded by the second times the range of the direction, so log(1 + range) / range
    of Newton's step always ascends (Sun and Tran-Dinh, 2019) and nothing has to be searched.

    Args:
        served: the factor of the step before is good enough.
    """
    stay_apart()
    newton = served or form_hessian(portions, plan, count, length, work)
    if newton:
        for i in range(count):
            work[STEP, i] = shares[0, i] - work[RECEIVED, i]
        solve_hessian(count, work)
        low = high = work[STEP, 0]
        for i in range(count):
            low, high = min(low, work[STEP, i]), max(high, work[STEP, i])
        if high - low > 1.0:
            shorter = math.log1p(high - low) / (high - low)
            for i in range(count):
                work[STEP, i] *= shorter
    else:
        for i in range(count):
            work[STEP, i] = math.log(shares[0, i] / work[RECEIVED, i])
    return newton


@kernel
def share_out(scores, masses, shares, count, length, heat, tolerance, portions, plan, work):  # type: ignore[no-untyped-def]
    """The largest relative error of a share that is left, after Newton's method from the row POTENTIAL.

    Args:
        scores: ``(M, N)``, in units of epsilon.
        masses: b, ``(1, N)``.
        shares: a, ``(1, M)``.
        heat: by which epsilon is enlarged at first; then it is lowered in stages. One for a start that is near.
        tolerance: on the error.
        portions, plan: A and P, ``(M, N)``, are filled.
        work: rows POTENTIAL to HESSIAN; the first two are filled.
    """
    stay_apart()
    divide_nodes(scores, heat, masses, count, length, portions, plan, work)
    moved, error = 0.0, worst_share(shares, count, work)
    if not error > tolerance and not heat > 1.0:
        return error
    newton = error < HALFWAY
    if newton:
        newton = ascend(shares, count, length, portions, plan, False, work)
    else:  # one step of Sinkhorn's, then Newton's
        for i in range(count):
            work[STEP, i] = math.log(shares[0, i] / work[RECEIVED, i])
    for _ in range(MOST_STEPS):
        largest = 0.0
        for i in range(count):
            work[POTENTIAL, i] += work[STEP, i]
            work[FACTORS, i] = math.exp(work[STEP, i])
            largest = max(largest, abs(work[STEP, i]))
        moved += largest
        if moved > REWEIGHED:  # what was too small to be kept may matter now
            moved = 0.0
            divide_nodes(scores, heat, masses, count, length, portions, plan, work)
        else:
            reweigh_nodes(masses, count, length, portions, plan, work)
        before, error = error, worst_share(shares, count, work)
        if not heat > 1.0 and STALLED > error > 0.5 * before:  # rounding
            break
        if not error > (HALFWAY if heat > 1.0 else tolerance):
            if not heat > 1.0 or math.isnan(error):
                break
            cooler = max(heat / COOLING, 1.0)
            for i in range(count):
                work[POTENTIAL, i] *= heat / cooler
            heat, moved, newton = cooler, 0.0, False
            divide_nodes(scores, heat, masses, count, length, portions, plan, work)
        newton = ascend(shares, count, length, portions, plan, newton and error <= SERVED * before, work)
    if heat > 1.0:  # too few steps
        divide_nodes(scores, 1.0, masses, count, length, portions, plan, work)
        error = worst_share(shares, count, work)
    return error


@kernel
def first_heat(scores, count, size):  # type: ignore[no-untyped-def]
    """Factor by which epsilon is first enlarged, so that the scores of a node are not too far apart."""
    stay_apart()
    widest = widest_range(scores, count, size)
    return widest / WIDE if widest > WIDE else 1.0
