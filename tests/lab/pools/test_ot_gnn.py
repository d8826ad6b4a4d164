from __future__ import annotations

import math

import torch
from scipy.optimize import linear_sum_assignment

from flowpool.lab.pools.ot_gnn import NUM_PROTOTYPES, WEIGHT, OTGNNPool

NO_EDGES = torch.empty(2, 0, dtype=torch.long)


def test_distances_are_those_of_the_best_assignment() -> None:
    torch.manual_seed(0)
    pool, x = OTGNNPool(3, 5).double(), torch.randn(5, 3, dtype=torch.float64)
    vector = pool(x, NO_EDGES, torch.zeros(5, dtype=torch.long), 1).vector[0]
    for distance, cloud in zip(vector, pool.prototypes.detach(), strict=True):
        cost = torch.cdist(cloud, x).square()
        torch.testing.assert_close(distance.detach(), cost[linear_sum_assignment(cost)].mean())


def test_loss_tells_the_optimal_plan_from_shifted_ones() -> None:
    """Two nodes and two points on a line, (0, 1) and (0, s): the plans cost (1 - s)^2 / 2 and (1 + s^2) / 2."""
    pool = OTGNNPool(1, 2).double()
    x, batch = torch.tensor([[0.0], [1.0]], dtype=torch.float64), torch.zeros(2, dtype=torch.long)
    for spread in (0.0, 2.0):
        with torch.no_grad():
            pool.prototypes.copy_(torch.tensor([[0.0], [spread]]).expand(NUM_PROTOTYPES, 2, 1))
        expected = WEIGHT * math.log1p(math.exp(-spread))  # the difference of the two costs is s
        assert math.isclose(float(pool(x, NO_EDGES, batch, 1).loss), expected, rel_tol=1e-12)


def test_the_loss_spreads_prototypes_that_nearly_collapsed() -> None:
    torch.manual_seed(0)
    pool, x = OTGNNPool(3, 4), torch.randn(40, 3)
    batch = torch.arange(4).repeat_interleave(10)
    with torch.no_grad():
        pool.prototypes.mul_(0.01)
    before = float(pool.prototypes.detach().std(1).mean())
    optimizer = torch.optim.Adam(pool.parameters(), 0.05)
    for _ in range(20):
        optimizer.zero_grad()
        pool(x, NO_EDGES, batch, 4).loss.backward()
        optimizer.step()
    assert float(pool.prototypes.detach().std(1).mean()) > 10 * before
