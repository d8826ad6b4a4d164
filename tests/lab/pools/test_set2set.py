from __future__ import annotations

import torch

from flowpool.lab.pools.set2set import Set2SetPool

NO_EDGES = torch.empty(2, 0, dtype=torch.long)


def test_without_a_query_it_reads_the_mean() -> None:
    pool, x = Set2SetPool(3, 1), torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    for parameter in pool.parameters():
        torch.nn.init.zeros_(parameter)
    vector = pool(x, NO_EDGES, torch.zeros(6, dtype=torch.long), 1).vector[0]
    torch.testing.assert_close(vector, torch.cat([torch.zeros(3), x.mean(0)]))


def test_it_reads_by_the_softmax_of_the_products_with_its_query() -> None:
    torch.manual_seed(0)
    pool, x = Set2SetPool(3, 1), torch.randn(6, 3)
    query, read = pool(x, NO_EDGES, torch.zeros(6, dtype=torch.long), 1).vector[0].split(3)
    assert float(query.detach().abs().max()) > 0
    torch.testing.assert_close(read, (x @ query).softmax(0) @ x)
