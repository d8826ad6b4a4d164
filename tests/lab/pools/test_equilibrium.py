from __future__ import annotations

import torch
from torch import Tensor, nn

from flowpool.lab.pools.equilibrium import EquilibriumPool

NO_EDGES = torch.empty(2, 0, dtype=torch.long)


class Square(nn.Module):
    def forward(self, x: Tensor, y: Tensor, index: Tensor, dim_size: int) -> Tensor:
        sizes = torch.bincount(index, minlength=dim_size)
        return ((x - y[index]).square().sum(1) / sizes[index]).sum()


def test_it_approaches_the_minimum_of_its_energy() -> None:
    """With the square of the distance for an energy that is the mean, drawn to zero by the other term."""
    pool = EquilibriumPool(3, 1)
    pool.aggregation.potential = Square()
    pool.aggregation.grad_iter = 60
    with torch.no_grad():
        pool.aggregation.optimizer._lr.fill_(-2.0)
        pool.aggregation.lamb.fill_(0.3)
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    batch = torch.tensor([0, 0, 1, 1, 1, 1, 1])
    means = torch.stack([x[:2].mean(0), x[2:].mean(0)])
    vector = pool(x, NO_EDGES, batch, 2).vector
    torch.testing.assert_close(vector, means / (1 + nn.functional.softplus(torch.tensor(0.3))), rtol=1e-4, atol=1e-5)


def test_without_gradients_the_vector_has_none() -> None:
    pool, x = EquilibriumPool(3, 1), torch.randn(4, 3)
    with torch.no_grad():
        assert not pool(x, NO_EDGES, torch.zeros(4, dtype=torch.long), 1).vector.requires_grad
