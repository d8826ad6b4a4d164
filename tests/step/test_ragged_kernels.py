"""Ragged products by kernels and by torch against NumPy, graph by graph."""

import numpy as np
import pytest
import torch

from flowpool.step import ragged_kernels as ragged
from flowpool.step.ragged import products_in_torch, sums_in_torch

GENERATOR = np.random.default_rng(0)
SIZES = [7, 0, 1, 30, 4, 0]
PTR = np.cumsum([0, *SIZES])


@pytest.mark.parametrize(("count", "width"), [(1, 1), (3, 8), (4, 5), (5, 17), (16, 33)])
def test_products_against_numpy(count, width):
    left = GENERATOR.standard_normal((PTR[-1], count))
    right = GENERATOR.standard_normal((PTR[-1], width))
    matrices = GENERATOR.standard_normal((len(SIZES), count, width))
    given = [torch.from_numpy(value) for value in (left, right, matrices, PTR)]
    by_torch = sums_in_torch(given[0], given[1], given[3]), products_in_torch(given[0], given[2], given[3])
    by_kernels = ragged.sums_of_products(left, right, PTR, 1), ragged.products_of_rows(left, matrices, PTR, 1)
    for sums, products in (by_kernels, [value.numpy() for value in by_torch]):
        for graph in range(len(SIZES)):
            own = slice(PTR[graph], PTR[graph + 1])
            np.testing.assert_allclose(sums[graph], left[own].T @ right[own], rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(products[own], left[own] @ matrices[graph], rtol=1e-12, atol=1e-13)


def test_nan_stays_in_its_graph_and_no_bit_depends_on_company_or_threads(monkeypatch):
    left, right = GENERATOR.standard_normal((PTR[-1], 5)), GENERATOR.standard_normal((PTR[-1], 11))
    sums = ragged.sums_of_products(left, right, PTR, 1)
    products = ragged.products_of_rows(left, sums, PTR, 1)
    monkeypatch.setattr(ragged, "SHARE", 1)  # or such small graphs would get one thread
    broken = left.copy()
    broken[3] = np.nan
    after = ragged.sums_of_products(broken, right, PTR, 4)
    assert np.isnan(after[0]).all()
    np.testing.assert_array_equal(after[1:], sums[1:])
    np.testing.assert_array_equal(ragged.products_of_rows(broken, sums, PTR, 4)[7:], products[7:])
    for graph in range(len(SIZES)):
        own, alone = slice(PTR[graph], PTR[graph + 1]), np.array([0, SIZES[graph]])
        np.testing.assert_array_equal(ragged.sums_of_products(left[own], right[own], alone, 1)[0], sums[graph])
        np.testing.assert_array_equal(
            ragged.products_of_rows(left[own], sums[graph : graph + 1], alone, 1), products[own]
        )
