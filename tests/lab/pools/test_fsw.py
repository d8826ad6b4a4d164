from __future__ import annotations

import math

import pytest
import torch

from flowpool.lab.pools.fsw import FSWPool

NO_EDGES = torch.empty(2, 0, dtype=torch.long)


@pytest.mark.parametrize("size", [1, 5])
def test_cosine_transform_of_the_quantiles_of_each_slice(size: int) -> None:
    """Quantiles are steps of width 1 / N, over each of which the cosine has a closed integral."""
    torch.manual_seed(0)
    pool, x = FSWPool(3, 1).double(), torch.randn(size, 3, dtype=torch.float64)
    slices, frequencies = pool.embedding.slice_vectors, pool.embedding.frequencies
    edges = torch.arange(size + 1, dtype=torch.float64) / size
    angles = 2 * math.pi * frequencies[:, None]
    integrals = ((angles * edges[1:]).sin() - (angles * edges[:-1]).sin()) / angles  # (L, N)
    ordered = (x @ slices.T).sort(0).values  # (N, L)
    expected = 2 * (1 + frequencies) * (integrals * ordered.T).sum(1)
    vector = pool(x, NO_EDGES, torch.zeros(size, dtype=torch.long), 1).vector[0]
    torch.testing.assert_close(vector, expected, rtol=1e-9, atol=1e-9)


def test_a_measure_has_no_size() -> None:
    torch.manual_seed(0)
    pool, x = FSWPool(3, 1).double(), torch.randn(4, 3, dtype=torch.float64)
    both = torch.cat([x, x.repeat(2, 1)])
    vectors = pool(both, NO_EDGES, torch.tensor([0] * 4 + [1] * 8), 2).vector
    torch.testing.assert_close(vectors[0], vectors[1])
