from __future__ import annotations

import torch
from torch_geometric.nn.aggr import SortAggregation

from flowpool.lab.pools.sort import SortPool


def test_equals_pyg() -> None:
    torch.manual_seed(0)
    x, batch = torch.randn(20, 3), torch.tensor([0] * 2 + [1] * 11 + [2] * 7)
    readout = SortPool(3, 4)(x, torch.empty(2, 0, dtype=torch.long), batch, 3)
    assert torch.equal(readout.vector, SortAggregation(k=4)(x, batch))


def test_keeps_the_nodes_that_are_largest_in_the_last_feature() -> None:
    x = torch.tensor([[1.0, 0.5], [2.0, 3.0], [3.0, -1.0]])
    cloud = SortPool(2, 2).points(x, torch.empty(2, 0, dtype=torch.long), torch.zeros(3, dtype=torch.long), 1)
    assert cloud.points[0].tolist() == [[2.0, 3.0], [1.0, 0.5]]
