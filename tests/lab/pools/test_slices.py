from __future__ import annotations

import numpy as np
import ot
import pytest
import torch

from flowpool.lab.pools.slices import GeneralisedSlicesPool, SlicesPool, quantiles

NO_EDGES = torch.empty(2, 0, dtype=torch.long)


def embed(pool: SlicesPool, x: torch.Tensor) -> torch.Tensor:
    vector: torch.Tensor = pool(x, NO_EDGES, torch.zeros(len(x), dtype=torch.long), 1).vector
    return vector.view(len(pool.reference), -1)


def test_equals_sorting_when_sizes_match() -> None:
    torch.manual_seed(0)
    pool, x = SlicesPool(3, 6), torch.randn(6, 3)
    reference = pool.reference @ pool.slices()
    nodes = x @ pool.slices()
    for column in range(3):
        rising = reference[:, column].argsort()
        displacement = embed(pool, x)[rising, column]
        torch.testing.assert_close(displacement, nodes[:, column].sort().values - reference[rising, column])


def test_squared_length_is_the_sliced_transport_cost_to_the_reference_when_sizes_match() -> None:
    torch.manual_seed(0)
    pool, x = SlicesPool(3, 6).double(), torch.randn(6, 3, dtype=torch.float64)
    slices = pool.slices().detach()
    costs = ot.wasserstein_1d((x @ slices).numpy(), (pool.reference.detach() @ slices).numpy(), p=2)
    np.testing.assert_allclose((embed(pool, x) ** 2).mean(0).detach().numpy(), costs, rtol=1e-10)


def test_generalised_slices_are_plain_ones_behind_a_network() -> None:
    torch.manual_seed(0)
    pool, x = GeneralisedSlicesPool(3, 6).double(), torch.randn(6, 3, dtype=torch.float64)
    plain = SlicesPool(3, 6).double()
    first, second = pool.network.lins

    def bent(rows: torch.Tensor) -> torch.Tensor:
        return (rows @ first.weight.T + first.bias).tanh() @ second.weight.T + second.bias

    with torch.no_grad():
        plain.directions.copy_(pool.directions)
        plain.reference.copy_(bent(pool.reference))
    torch.testing.assert_close(embed(pool, x), embed(plain, bent(x)))
    torch.testing.assert_close(embed(pool, pool.reference.detach()), torch.zeros(6, 3, dtype=torch.float64))


def test_order_does_not_matter() -> None:
    torch.manual_seed(0)
    pool, x = SlicesPool(3, 4), torch.randn(9, 3)
    torch.testing.assert_close(embed(pool, x.flip(0)), embed(pool, x))


def test_reference_itself_is_embedded_at_the_origin() -> None:
    torch.manual_seed(0)
    pool = SlicesPool(3, 4)
    torch.testing.assert_close(embed(pool, pool.reference.detach()), torch.zeros(4, 3))


@pytest.mark.parametrize("size", [1, 3, 4, 11])
def test_quantiles_are_numpys_hazen_quantiles(size: int) -> None:
    torch.manual_seed(size)
    values = torch.randn(size, 2, dtype=torch.float64)
    padded = torch.cat([values, torch.full((3, 2), torch.inf, dtype=torch.float64)]).unsqueeze(0)
    levels = (np.arange(4) + 0.5) / 4
    expected = np.quantile(values.numpy(), levels, axis=0, method="hazen")
    np.testing.assert_allclose(quantiles(padded, torch.tensor([size]), 4)[0].numpy(), expected, rtol=1e-12)
