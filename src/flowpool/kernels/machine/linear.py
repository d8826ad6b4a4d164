"""Symmetric positive definite systems: factorisation without square roots, substitution, products of rows.

A matrix lives in the upper triangle of a row-major array whose rows are padded to a multiple of eight; what stands below the
diagonal is scratch. ``matrix = U^T diag(pivot)^-1 U`` with ``U[k, k] = pivot[k]``; the array keeps U. Substitution goes four
unknowns at a time. Between them it takes ``U[k, j] / pivot[k]``, so that no pivot stands in the way from one to the next.
"""

from __future__ import annotations

from flowpool.kernels.machine.jit import kernel, shared
from flowpool.kernels.machine.lanes import WIDTH, add, fma, load, multiply, splat, store, total
from flowpool.kernels.machine.rows import stay_apart
from flowpool.kernels.machine.vectors import combine, fill, norm


@shared
def padded(size):  # type: ignore[no-untyped-def]
    """``size`` rounded up to a multiple of eight."""
    return (size + WIDTH - 1) // WIDTH * WIDTH


@kernel
def factorise(matrix, size, inverse):  # type: ignore[no-untyped-def]
    """Whether the matrix is positive definite; it is then replaced by U, and ``inverse`` by the inverse pivots."""
    stay_apart()
    end = padded(size)
    for first in range(0, size, 4):
        last = min(first + 4, size)
        for k in range(first, last):
            start = k // WIDTH * WIDTH
            for j in range(start, end, WIDTH):
                value = load(matrix, k, j)
                for p in range(first, k):
                    value = fma(splat(-matrix[p, k] * inverse[0, p]), load(matrix, p, j), value)
                store(matrix, k, j, value)
            pivot = matrix[k, k]
            if not pivot > 0.0:  # also for NaN
                return False
            inverse[0, k] = 1.0 / pivot
        # Four rows are taken from two others at a time, so that an entry is loaded and stored once for several products.
        for i in range(last, size, 2):
            k = min(
                i + 1, size - 1
            )  # at the rim the last row is taken twice: the second time writes what the first did
            factor0 = splat(-matrix[first, i] * inverse[0, first])
            factor1 = splat(-matrix[first + 1, i] * inverse[0, first + 1])
            factor2 = splat(-matrix[first + 2, i] * inverse[0, first + 2])
            factor3 = splat(-matrix[first + 3, i] * inverse[0, first + 3])
            other0 = splat(-matrix[first, k] * inverse[0, first])
            other1 = splat(-matrix[first + 1, k] * inverse[0, first + 1])
            other2 = splat(-matrix[first + 2, k] * inverse[0, first + 2])
            other3 = splat(-matrix[first + 3, k] * inverse[0, first + 3])
            for j in range(i // WIDTH * WIDTH, end, WIDTH):
                row = load(matrix, first, j)
                value = fma(factor0, row, load(matrix, i, j))
                other = fma(other0, row, load(matrix, k, j))
                row = load(matrix, first + 1, j)
                value = fma(factor1, row, value)
                other = fma(other1, row, other)
                row = load(matrix, first + 2, j)
                value = fma(factor2, row, value)
                other = fma(other2, row, other)
                row = load(matrix, first + 3, j)
                store(matrix, i, j, fma(factor3, row, value))
                store(matrix, k, j, fma(other3, row, other))
    # Substitution works on whole lanes and relies on zeros to the left of the diagonal.
    for k in range(size):
        for j in range(k // WIDTH * WIDTH, k):
            matrix[k, j] = 0.0
        for j in range(size, end):
            matrix[k, j] = 0.0
    return True


@shared
def smallest_pivot(inverse, size):  # type: ignore[no-untyped-def]
    """The smallest pivot of a factor."""
    largest = 0.0
    for k in range(size):
        largest = max(largest, inverse[0, k])
    return 1.0 / largest


@kernel
def substitute(matrix, size, inverse, right, solution, row):  # type: ignore[no-untyped-def]
    """Solves with a factorised matrix: ``solution[row]`` from ``right[row]``, which is overwritten.

    Four unknowns at a time: between them in scalars, then all that follow from them in lanes.
    """
    stay_apart()
    end = padded(size)
    whole = size // 4 * 4
    for k in range(0, whole, 4):
        by0, by1, by2 = inverse[0, k], inverse[0, k + 1], inverse[0, k + 2]
        value0 = right[row, k]
        value1 = right[row, k + 1] - matrix[k, k + 1] * by0 * value0
        value2 = right[row, k + 2] - matrix[k, k + 2] * by0 * value0 - matrix[k + 1, k + 2] * by1 * value1
        value3 = right[row, k + 3] - matrix[k, k + 3] * by0 * value0 - matrix[k + 1, k + 3] * by1 * value1
        value3 -= matrix[k + 2, k + 3] * by2 * value2
        value0 *= by0
        value1 *= by1
        value2 *= by2
        value3 *= inverse[0, k + 3]
        solution[row, k] = value0
        solution[row, k + 1] = value1
        solution[row, k + 2] = value2
        solution[row, k + 3] = value3
        for j in range(k // WIDTH * WIDTH, end, WIDTH):
            value = fma(splat(-value0), load(matrix, k, j), load(right, row, j))
            value = fma(splat(-value1), load(matrix, k + 1, j), value)
            value = fma(splat(-value2), load(matrix, k + 2, j), value)
            store(right, row, j, fma(splat(-value3), load(matrix, k + 3, j), value))
    for k in range(whole, size):
        value0 = right[row, k]
        for p in range(whole, k):
            value0 -= matrix[p, k] * solution[row, p]
        solution[row, k] = value0 * inverse[0, k]

    # What is found from here on goes to ``right``, where zeros stand for what is still to be found.
    for j in range(0, end, WIDTH):
        store(right, row, j, splat(0.0))
    for k in range(size - 1, whole - 1, -1):
        value0 = 0.0
        for p in range(k + 1, size):
            value0 += matrix[k, p] * right[row, p]
        right[row, k] = solution[row, k] - value0 * inverse[0, k]
    for k in range(whole - 4, -1, -4):
        sum0 = splat(0.0)
        sum1 = splat(0.0)
        sum2 = splat(0.0)
        sum3 = splat(0.0)
        for j in range(k // WIDTH * WIDTH, end, WIDTH):
            value = load(right, row, j)
            sum0 = fma(load(matrix, k, j), value, sum0)
            sum1 = fma(load(matrix, k + 1, j), value, sum1)
            sum2 = fma(load(matrix, k + 2, j), value, sum2)
            sum3 = fma(load(matrix, k + 3, j), value, sum3)
        by0, by1, by2 = inverse[0, k], inverse[0, k + 1], inverse[0, k + 2]
        value3 = solution[row, k + 3] - total(sum3) * inverse[0, k + 3]
        value2 = solution[row, k + 2] - total(sum2) * by2 - matrix[k + 2, k + 3] * by2 * value3
        value1 = solution[row, k + 1] - total(sum1) * by1 - matrix[k + 1, k + 3] * by1 * value3
        value1 -= matrix[k + 1, k + 2] * by1 * value2
        value0 = solution[row, k] - total(sum0) * by0 - matrix[k, k + 3] * by0 * value3
        value0 = value0 - matrix[k, k + 2] * by0 * value2 - matrix[k, k + 1] * by0 * value1
        right[row, k] = value0
        right[row, k + 1] = value1
        right[row, k + 2] = value2
        right[row, k + 3] = value3
    for j in range(0, end, WIDTH):
        store(solution, row, j, load(right, row, j))


@kernel
def smallest_eigenvalue(matrix, size, inverse, times, right, solution):  # type: ignore[no-untyped-def]
    """That of a factorised matrix, by inverse iteration from the coordinate with the smallest pivot; two rows are scratch.

    A bound from above that is never worse than the pivot; infinite for a matrix of size zero.
    """
    stay_apart()
    start, length = 0, 0.0
    for k in range(size):
        start = k if inverse[0, k] > inverse[0, start] else start
    for j in range(padded(size)):
        right[0, j] = 1.0 if j == start else 0.0
    for _ in range(times):
        substitute(matrix, size, inverse, right, solution, 0)
        length = norm(solution, padded(size))
        fill(right, 0.0, padded(size))
        combine(right, 1.0 / length, solution, right, padded(size))
    return 1.0 / length


@kernel
def reduce_rows(matrix, size, inverse, rows, offset, length):  # type: ignore[no-untyped-def]
    """Replaces R, the ``size`` rows from ``offset`` on, by Z such that ``R^T matrix^-1 R = sum_k Z_k^T Z_k / inverse_k``."""
    stay_apart()
    whole = size // 4 * 4
    for k in range(0, whole, 4):
        by0, by1, by2 = inverse[0, k], inverse[0, k + 1], inverse[0, k + 2]
        for j in range(0, length, WIDTH):
            value0 = load(rows, offset + k, j)
            value1 = load(rows, offset + k + 1, j)
            value2 = load(rows, offset + k + 2, j)
            value3 = load(rows, offset + k + 3, j)
            for p in range(k):
                value = load(rows, offset + p, j)
                value0 = fma(splat(-matrix[p, k]), value, value0)
                value1 = fma(splat(-matrix[p, k + 1]), value, value1)
                value2 = fma(splat(-matrix[p, k + 2]), value, value2)
                value3 = fma(splat(-matrix[p, k + 3]), value, value3)
            value1 = fma(splat(-matrix[k, k + 1] * by0), value0, value1)
            value2 = fma(splat(-matrix[k, k + 2] * by0), value0, value2)
            value3 = fma(splat(-matrix[k, k + 3] * by0), value0, value3)
            value2 = fma(splat(-matrix[k + 1, k + 2] * by1), value1, value2)
            value3 = fma(splat(-matrix[k + 1, k + 3] * by1), value1, value3)
            value3 = fma(splat(-matrix[k + 2, k + 3] * by2), value2, value3)
            store(rows, offset + k, j, multiply(splat(by0), value0))
            store(rows, offset + k + 1, j, multiply(splat(by1), value1))
            store(rows, offset + k + 2, j, multiply(splat(by2), value2))
            store(rows, offset + k + 3, j, multiply(splat(inverse[0, k + 3]), value3))
    for k in range(whole, size):
        for j in range(0, length, WIDTH):
            value0 = load(rows, offset + k, j)
            for p in range(k):
                value0 = fma(splat(-matrix[p, k]), load(rows, offset + p, j), value0)
            store(rows, offset + k, j, multiply(splat(inverse[0, k]), value0))


@kernel
def substitute_rows(matrix, size, inverse, rows, length):  # type: ignore[no-untyped-def]
    """Replaces R by ``matrix^-1 R`` for a factorised matrix, R of ``size`` rows."""
    stay_apart()
    reduce_rows(matrix, size, inverse, rows, 0, length)
    whole = size // 4 * 4
    for k in range(size - 1, whole - 1, -1):
        for j in range(0, length, WIDTH):
            sum0 = splat(0.0)
            for p in range(k + 1, size):
                sum0 = fma(splat(matrix[k, p]), load(rows, p, j), sum0)
            store(rows, k, j, fma(splat(-inverse[0, k]), sum0, load(rows, k, j)))
    for k in range(whole - 4, -1, -4):
        by0, by1, by2 = inverse[0, k], inverse[0, k + 1], inverse[0, k + 2]
        for j in range(0, length, WIDTH):
            sum0 = splat(0.0)
            sum1 = splat(0.0)
            sum2 = splat(0.0)
            sum3 = splat(0.0)
            for p in range(k + 4, size):
                value = load(rows, p, j)
                sum0 = fma(splat(matrix[k, p]), value, sum0)
                sum1 = fma(splat(matrix[k + 1, p]), value, sum1)
                sum2 = fma(splat(matrix[k + 2, p]), value, sum2)
                sum3 = fma(splat(matrix[k + 3, p]), value, sum3)
            value3 = fma(splat(-inverse[0, k + 3]), sum3, load(rows, k + 3, j))
            value2 = fma(splat(-by2), sum2, load(rows, k + 2, j))
            value1 = fma(splat(-by1), sum1, load(rows, k + 1, j))
            value0 = fma(splat(-by0), sum0, load(rows, k, j))
            value2 = fma(splat(-matrix[k + 2, k + 3] * by2), value3, value2)
            value1 = fma(splat(-matrix[k + 1, k + 3] * by1), value3, value1)
            value0 = fma(splat(-matrix[k, k + 3] * by0), value3, value0)
            value1 = fma(splat(-matrix[k + 1, k + 2] * by1), value2, value1)
            value0 = fma(splat(-matrix[k, k + 2] * by0), value2, value0)
            store(rows, k + 3, j, value3)
            store(rows, k + 2, j, value2)
            store(rows, k + 1, j, value1)
            store(rows, k, j, fma(splat(-matrix[k, k + 1] * by0), value1, value0))


@kernel
def add_outer(rows, count, weighted, size, matrix):  # type: ignore[no-untyped-def]
    """Adds ``rows^T weighted`` to the upper triangle of the matrix, which has room for an even number of rows."""
    stay_apart()
    end = padded(size)
    for i in range(0, size, 2):
        for j in range(i // WIDTH * WIDTH, end, WIDTH):
            first = load(matrix, i, j)
            second = load(matrix, i + 1, j)
            for m in range(count):
                value = load(rows, m, j)
                first = fma(splat(weighted[m, i]), value, first)
                second = fma(splat(weighted[m, i + 1]), value, second)
            store(matrix, i, j, first)
            store(matrix, i + 1, j, second)


@kernel
def row_products(left, left_count, right, right_first, right_count, length, result, upper):  # type: ignore[no-untyped-def]
    """``result[i, k] = sum_j left[i, j] right[right_first + k, j]``, in tiles of three by two rows.

    Six sums of eight numbers and what they are made of fit into sixteen registers of four numbers.

    Args:
        upper: only the tiles that reach the upper triangle are needed.
    """
    stay_apart()
    for k0 in range(0, right_count, 2):
        # At the rim a tile repeats its last row; the same number is then written twice.
        k1 = min(k0 + 1, right_count - 1)
        for i0 in range(0, min(left_count, k1 + 1) if upper else left_count, 3):
            i1 = min(i0 + 1, left_count - 1)
            i2 = min(i0 + 2, left_count - 1)
            sum00 = splat(0.0)
            sum01 = splat(0.0)
            sum10 = splat(0.0)
            sum11 = splat(0.0)
            sum20 = splat(0.0)
            sum21 = splat(0.0)
            for j in range(0, length, WIDTH):
                first = load(right, right_first + k0, j)
                second = load(right, right_first + k1, j)
                value = load(left, i0, j)
                sum00 = fma(value, first, sum00)
                sum01 = fma(value, second, sum01)
                value = load(left, i1, j)
                sum10 = fma(value, first, sum10)
                sum11 = fma(value, second, sum11)
                value = load(left, i2, j)
                sum20 = fma(value, first, sum20)
                sum21 = fma(value, second, sum21)
            result[i0, k0] = total(sum00)
            result[i0, k1] = total(sum01)
            result[i1, k0] = total(sum10)
            result[i1, k1] = total(sum11)
            result[i2, k0] = total(sum20)
            result[i2, k1] = total(sum21)


@kernel
def add_combinations(weights, count, terms, rows, width, result):  # type: ignore[no-untyped-def]
    """``result[i] += sum_k weights[i, k] rows[k]`` for i < ``count`` and k < ``terms``, four rows and two lanes at a time."""
    stay_apart()
    paired = width // (2 * WIDTH) * (2 * WIDTH)
    for i0 in range(0, count, 4):
        # At the rim the last row is repeated; the same numbers are then written twice.
        i1 = min(i0 + 1, count - 1)
        i2 = min(i0 + 2, count - 1)
        i3 = min(i0 + 3, count - 1)
        for c in range(0, paired, 2 * WIDTH):
            d = c + WIDTH
            sum0, more0 = load(result, i0, c), load(result, i0, d)
            sum1, more1 = load(result, i1, c), load(result, i1, d)
            sum2, more2 = load(result, i2, c), load(result, i2, d)
            sum3, more3 = load(result, i3, c), load(result, i3, d)
            for k in range(terms):
                value, more = load(rows, k, c), load(rows, k, d)
                sum0, more0 = fma(splat(weights[i0, k]), value, sum0), fma(splat(weights[i0, k]), more, more0)
                sum1, more1 = fma(splat(weights[i1, k]), value, sum1), fma(splat(weights[i1, k]), more, more1)
                sum2, more2 = fma(splat(weights[i2, k]), value, sum2), fma(splat(weights[i2, k]), more, more2)
                sum3, more3 = fma(splat(weights[i3, k]), value, sum3), fma(splat(weights[i3, k]), more, more3)
            store(result, i0, c, sum0)
            store(result, i1, c, sum1)
            store(result, i2, c, sum2)
            store(result, i3, c, sum3)
            store(result, i0, d, more0)
            store(result, i1, d, more1)
            store(result, i2, d, more2)
            store(result, i3, d, more3)
        for c in range(paired, width, WIDTH):
            sum0 = load(result, i0, c)
            sum1 = load(result, i1, c)
            sum2 = load(result, i2, c)
            sum3 = load(result, i3, c)
            for k in range(terms):
                value = load(rows, k, c)
                sum0 = fma(splat(weights[i0, k]), value, sum0)
                sum1 = fma(splat(weights[i1, k]), value, sum1)
                sum2 = fma(splat(weights[i2, k]), value, sum2)
                sum3 = fma(splat(weights[i3, k]), value, sum3)
            store(result, i0, c, sum0)
            store(result, i1, c, sum1)
            store(result, i2, c, sum2)
            store(result, i3, c, sum3)


@kernel
def transpose(rows, count, dimension, columns):  # type: ignore[no-untyped-def]
    """Fills ``columns``, ``(dimension, count)``, with zeros up to whole lanes."""
    stay_apart()
    for e in range(dimension):
        for i in range(count):
            columns[e, i] = rows[i, e]
        for i in range(count, padded(count)):
            columns[e, i] = 0.0


@shared
def row_total(rows, row, length):  # type: ignore[no-untyped-def]
    """Sum of one row."""
    result = splat(0.0)
    for j in range(0, length, WIDTH):
        result = add(result, load(rows, row, j))
    return total(result)
