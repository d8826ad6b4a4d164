from __future__ import annotations

import math

import torch

from flowpool.lab.pools.pna import PNAPool

NO_EDGES = torch.empty(2, 0, dtype=torch.long)


def test_four_aggregations_as_they_are_and_scaled_up_and_down_with_the_size() -> None:
    torch.manual_seed(0)
    pool = PNAPool(2, 1).double()
    pool.fit(torch.zeros(9, 2), torch.tensor([0] * 2 + [1] * 7))
    delta = (math.log(3) + math.log(8)) / 2
    x = torch.randn(5, 2, dtype=torch.float64)
    plain = torch.cat([x.mean(0), x.amax(0), x.amin(0), x.std(0, correction=0)])
    scale = math.log(6) / delta
    vector = pool(x, NO_EDGES, torch.zeros(5, dtype=torch.long), 1).vector[0]
    torch.testing.assert_close(vector, torch.cat([plain, plain * scale, plain / scale]), rtol=1e-6, atol=1e-6)
