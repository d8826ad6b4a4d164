from __future__ import annotations

import torch

from flowpool.lab.pools.sinkformer import SinkformerPool


def test_attention_is_doubly_stochastic() -> None:
    torch.manual_seed(0)
    mask = torch.tensor([[True] * 9, [True] * 4 + [False] * 5])
    nodes = 2 * torch.randn(2, 9, 3) * mask.unsqueeze(2)
    attention = SinkformerPool(3, 5).attention(nodes, mask)
    torch.testing.assert_close(attention.sum(2), mask.float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(attention.sum(1), mask.float(), rtol=0, atol=1e-6)
    assert bool((attention >= 0).all())


def test_equal_keys_average_the_nodes() -> None:
    """Without scores attention is uniform; zero seeds weigh nodes alike: each reads mean(Y) + mean(Y) W_V."""
    torch.manual_seed(0)
    pool, x = SinkformerPool(3, 2), torch.randn(6, 3)
    with torch.no_grad():
        pool.key.weight.zero_()
        pool.seeds.zero_()
    readout = pool(x, torch.empty(2, 0, dtype=torch.long), torch.zeros(6, dtype=torch.long), 1)
    mean = x.mean(0)
    torch.testing.assert_close(readout.vector.view(2, 3), (mean + pool.value(mean)).expand(2, 3))
