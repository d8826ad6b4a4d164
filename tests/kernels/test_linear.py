"""Systems and products of rows against NumPy, for every remainder of the blocks that they work in."""

import numpy as np
import pytest
from numpy.typing import NDArray

from flowpool.kernels.machine.jit import entry
from flowpool.kernels.machine.linear import add_combinations, factorise, reduce_rows, substitute, substitute_rows
from flowpool.kernels.machine.rows import rows_of

Array = NDArray[np.float64]
LANES = 8
SIZES = [*range(1, 14), 16, 31, 37]


@entry
def solved(matrix, size, scratch, vector, solution, reduced, rows):  # type: ignore[no-untyped-def]
    """Fills ``solution``, replaces the rows by theirs, and reduces ``reduced``; the vector is used up."""
    inverse, right, length = rows_of(scratch), rows_of(vector), rows.shape[1]
    definite = factorise(rows_of(matrix), size, inverse)
    if definite:
        substitute(rows_of(matrix), size, inverse, right, rows_of(solution), 0)
        reduce_rows(rows_of(matrix), size, inverse, rows_of(reduced), 1, length)
        substitute_rows(rows_of(matrix), size, inverse, rows_of(rows), length)
    return definite


@entry
def combined(weights, rows, result):  # type: ignore[no-untyped-def]
    count, terms = weights.shape
    add_combinations(rows_of(weights), count, terms, rows_of(rows), rows.shape[1], rows_of(result))


def padded(size: int) -> int:
    return -(-size // LANES) * LANES


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [8, 24])
def test_systems_are_solved(size: int, length: int) -> None:
    rng = np.random.default_rng(size)
    root = rng.standard_normal((size, size))
    whole = root @ root.T + 0.1 * np.eye(size)
    matrix = np.full((size + 1, padded(size)), np.nan)  # nothing below the diagonal and beside the matrix is read
    for k in range(size):
        matrix[k, k // LANES * LANES :] = 0.0
        matrix[k, k:size] = whole[k, k:]
    vector = np.zeros((1, padded(size)))
    vector[0, :size] = rng.standard_normal(size)
    rows = rng.standard_normal((size, length))
    expected, answers = np.linalg.solve(whole, vector[0, :size]), np.linalg.solve(whole, rows)
    given, reduced = rows.copy(), np.concatenate([np.ones((1, length)), rows])
    inverse = np.full((1, padded(size)), np.nan)
    solution = np.full_like(vector, np.nan)
    assert solved(matrix, size, inverse, vector, solution, reduced, rows)
    np.testing.assert_allclose(solution[0, :size], expected, rtol=0, atol=1e-11 * np.abs(expected).max())
    np.testing.assert_array_equal(solution[0, size:], 0.0)
    np.testing.assert_allclose(rows, answers, rtol=0, atol=1e-11 * np.abs(answers).max())
    products = reduced[1:].T @ (reduced[1:] / inverse[0, :size, None])
    np.testing.assert_allclose(products, given.T @ answers, rtol=0, atol=1e-10 * np.abs(answers).max())
    np.testing.assert_array_equal(reduced[0], 1.0)


def test_an_indefinite_matrix_and_one_of_nan_are_refused() -> None:
    for size in SIZES:
        for bad in (-1.0, np.nan):
            matrix = np.zeros((size + 1, padded(size)))
            matrix[:size, :size] = np.eye(size)
            matrix[size - 1, size - 1] = bad
            scratch, vector, rows = np.zeros((1, padded(size))), np.ones((1, padded(size))), np.ones((size, LANES))
            assert not solved(matrix, size, scratch, vector, vector.copy(), np.ones((size + 1, LANES)), rows)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("terms", [1, 2, 5, 16])
@pytest.mark.parametrize("width", [8, 16, 24, 40])
def test_combinations_are_products(count: int, terms: int, width: int) -> None:
    rng = np.random.default_rng(count)
    weights, rows = rng.standard_normal((count, terms)), rng.standard_normal((terms, width))
    result = rng.standard_normal((count, width))
    expected = result + weights @ rows
    combined(weights, rows, result)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-13 * terms)
