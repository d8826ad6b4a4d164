"""Blocks with tied weights approach their flow."""

import pytest
import torch

from flowpool.lab.paper import sinkformer


def test_the_error_falls_as_one_over_the_number_of_blocks() -> None:
    record = sinkformer.compute()
    ratios = [one / other for one, other in zip(record.errors[2:], record.errors[3:], strict=False)]
    assert ratios == pytest.approx([2.0] * len(ratios), abs=0.35)
    assert record.errors[-1] < 0.02
    assert torch.equal(record.paths[3][0], record.paths[64][0])


def test_the_readout_is_made_of_the_same_blocks() -> None:
    pool, nodes = sinkformer.tied_pool(), torch.randn(5, 2, dtype=torch.float64)
    *_, last = pool.walk(nodes[None], torch.ones(1, 5, dtype=torch.bool), pool.num_blocks)
    weights = (pool.seeds @ last[0].T / 2**0.5).softmax(1)
    found = pool.readout(nodes, torch.zeros(2, 0, dtype=torch.long), torch.zeros(5, dtype=torch.long), 1).vector
    torch.testing.assert_close(found, (weights @ last[0]).flatten()[None])
