from __future__ import annotations

import pytest
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
    """Without scores attention is uniform; zero seeds weigh nodes alike: each reads (I + W_V / 3)^3 mean(Y)."""
    torch.manual_seed(0)
    pool, x = SinkformerPool(3, 2), torch.randn(6, 3)
    with torch.no_grad():
        pool.key.weight.zero_()
        pool.seeds.zero_()
    readout = pool(x, torch.empty(2, 0, dtype=torch.long), torch.zeros(6, dtype=torch.long), 1)
    step = torch.eye(3) + pool.value.weight.detach() / 3
    expected = torch.linalg.matrix_power(step, 3) @ x.mean(0)
    torch.testing.assert_close(readout.vector.view(2, 3), expected.expand(2, 3))


def test_many_blocks_are_a_flow() -> None:
    """Euler steps of one equation: twice as many blocks, half the distance to the limit."""
    torch.manual_seed(0)
    pool, x = SinkformerPool(3, 2).double(), torch.randn(6, 3, dtype=torch.float64)
    batch, edges = torch.zeros(6, dtype=torch.long), torch.empty(2, 0, dtype=torch.long)
    found = []
    for pool.num_blocks in (8, 16, 128):
        found.append(pool(x, edges, batch, 1).vector.detach())
    errors = [float((vector - found[-1]).norm()) for vector in found[:2]]
    assert errors[0] > 1e-4
    assert errors[0] / errors[1] == pytest.approx(2, abs=0.3)
