"""Products of matrices in a ragged batch, graph after graph: the kernels of :mod:`flowpool.step.ragged`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowpool.kernels.machine.jit import entry, kernel
from flowpool.kernels.machine.lanes import WIDTH, fma, load, splat, store
from flowpool.kernels.machine.rows import draw, rows_of, stay_apart
from flowpool.kernels.machine.threads import run

Array = NDArray[np.float64]
SHARE = 2**20  # products from which another thread pays


@kernel
def multiply_rows(left, right, first, width, result, target):  # type: ignore[no-untyped-def]
    """``result[target + i] = sum_p left[i, p] right[first + p]``, rows of ``width`` numbers, four of them at a time."""
    stay_apart()
    count, terms = left.shape
    whole = width // WIDTH * WIDTH
    for i0 in range(0, count, 4):
        # At the rim a tile repeats its last row; the same number is then written twice.
        i1 = min(i0 + 1, count - 1)
        i2 = min(i0 + 2, count - 1)
        i3 = min(i0 + 3, count - 1)
        for j in range(0, whole, WIDTH):
            sum0 = splat(0.0)
            sum1 = splat(0.0)
            sum2 = splat(0.0)
            sum3 = splat(0.0)
            for p in range(terms):
                value = load(right, first + p, j)
                sum0 = fma(splat(left[i0, p]), value, sum0)
                sum1 = fma(splat(left[i1, p]), value, sum1)
                sum2 = fma(splat(left[i2, p]), value, sum2)
                sum3 = fma(splat(left[i3, p]), value, sum3)
            store(result, target + i0, j, sum0)
            store(result, target + i1, j, sum1)
            store(result, target + i2, j, sum2)
            store(result, target + i3, j, sum3)
        for j in range(whole, width):
            single0 = 0.0
            single1 = 0.0
            single2 = 0.0
            single3 = 0.0
            for p in range(terms):
                number = right[first + p, j]
                single0 += left[i0, p] * number
                single1 += left[i1, p] * number
                single2 += left[i2, p] * number
                single3 += left[i3, p] * number
            result[target + i0, j] = single0
            result[target + i1, j] = single1
            result[target + i2, j] = single2
            result[target + i3, j] = single3


@entry
def sum_graphs(left, right, ptr, counter, total):  # type: ignore[no-untyped-def]
    """Fills ``total``, ``(B K, L)``, for each graph that is drawn from the counter."""
    stay_apart()
    source, target, count = rows_of(right), rows_of(total), left.shape[1]
    while True:
        graph = draw(counter)
        if graph < 0 or graph >= len(ptr) - 1:
            break
        start, end = ptr[graph], ptr[graph + 1]
        multiply_rows(left[start:end].T, source, start, right.shape[1], target, graph * count)


@entry
def multiply_graphs(rows, matrices, ptr, counter, products):  # type: ignore[no-untyped-def]
    """Fills the rows of ``products``, ``(N, L)``, of each graph that is drawn; the matrices lie in one, ``(B K, L)``."""
    stay_apart()
    source, target, count = rows_of(matrices), rows_of(products), rows.shape[1]
    while True:
        graph = draw(counter)
        if graph < 0 or graph >= len(ptr) - 1:
            break
        start, end = ptr[graph], ptr[graph + 1]
        multiply_rows(rows[start:end], source, graph * count, matrices.shape[1], target, start)


def sums_of_products(left: Array, right: Array, ptr: NDArray[np.int64], threads: int) -> Array:
    """Sum of the outer products of the rows ``(N, K)`` and ``(N, L)`` over each graph, ``(B, K, L)``."""
    graphs, count, width = len(ptr) - 1, left.shape[1], right.shape[1]
    total = np.empty((graphs * count, width))
    run(
        lambda counter: sum_graphs(left, right, ptr, counter, total),
        graphs,
        min(threads, 1 + left.size * width // SHARE),
    )
    return total.reshape(graphs, count, width)


def products_of_rows(rows: Array, matrices: Array, ptr: NDArray[np.int64], threads: int) -> Array:
    """Each row ``(N, K)`` times the matrix of its graph ``(B, K, L)``, ``(N, L)``."""
    width = matrices.shape[2]
    flat, products = matrices.reshape(-1, width), np.empty((len(rows), width))
    run(
        lambda counter: multiply_graphs(rows, flat, ptr, counter, products),
        len(ptr) - 1,
        min(threads, 1 + rows.size * width // SHARE),
    )
    return products
