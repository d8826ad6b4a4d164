"""Neighbouring rows as one vector. Lengths count whole lanes, and so the padding of the rows."""

from __future__ import annotations

import math

from flowpool.kernels.machine.jit import kernel, shared
from flowpool.kernels.machine.lanes import WIDTH, fma, load, splat, store, total
from flowpool.kernels.machine.rows import stay_apart


@kernel
def inner_product(one, other, numbers):  # type: ignore[no-untyped-def]
    """Sum of the products of all entries; ``numbers`` counts them with their padding, which is zero."""
    stay_apart()
    result = splat(0.0)
    for p in range(0, numbers, WIDTH):
        result = fma(load(one, 0, p), load(other, 0, p), result)
    return total(result)


@shared
def norm(rows, numbers):  # type: ignore[no-untyped-def]
    """Frobenius norm."""
    return math.sqrt(inner_product(rows, rows, numbers))


@kernel
def combine(one, factor, other, result, numbers):  # type: ignore[no-untyped-def]
    """``result = one + factor other``."""
    stay_apart()
    for p in range(0, numbers, WIDTH):
        store(result, 0, p, fma(splat(factor), load(other, 0, p), load(one, 0, p)))


@kernel
def copy(source, target, numbers):  # type: ignore[no-untyped-def]
    """``target = source``."""
    stay_apart()
    for p in range(0, numbers, WIDTH):
        store(target, 0, p, load(source, 0, p))


@kernel
def fill(rows, value, numbers):  # type: ignore[no-untyped-def]
    """Sets all entries to a value."""
    stay_apart()
    for p in range(0, numbers, WIDTH):
        store(rows, 0, p, splat(value))


@kernel
def largest(row, count):  # type: ignore[no-untyped-def]
    """Largest absolute value of the first ``count`` entries; infinite if one is NaN."""
    stay_apart()
    result = 0.0
    for i in range(count):
        result = max(result, abs(row[0, i])) if row[0, i] == row[0, i] else math.inf
    return result
