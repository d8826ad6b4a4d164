from __future__ import annotations

import torch
from torch import nn

from flowpool.lab.pools.attention import NUM_HEADS, AttentionPool

NO_EDGES = torch.empty(2, 0, dtype=torch.long)


def test_each_head_is_a_mean_of_its_own_values_by_its_own_scores() -> None:
    torch.manual_seed(0)
    pool, x = AttentionPool(3, 1), torch.randn(6, 3)
    last, values = pool.aggregation.gate_nn[2], pool.aggregation.nn
    assert isinstance(last, nn.Linear)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    batch = torch.zeros(6, dtype=torch.long)
    equal = pool(x, NO_EDGES, batch, 1).vector[0]
    torch.testing.assert_close(equal, values(x).mean(0))
    with torch.no_grad():  # the second head looks at one node alone
        last.weight[1] = 1e4 * pool.aggregation.gate_nn[:2](x)[4]
    looked = pool(x, NO_EDGES, batch, 1).vector[0].view(NUM_HEADS, 3)
    hidden = pool.aggregation.gate_nn[:2](x)
    seen = int((hidden @ hidden[4]).argmax())
    torch.testing.assert_close(looked[1], values(x)[seen].view(NUM_HEADS, 3)[1])
    torch.testing.assert_close(looked[[0, 2, 3]], equal.view(NUM_HEADS, 3)[[0, 2, 3]])
