from __future__ import annotations

import pytest
import torch

from flowpool.lab.pools import POOLS

NO_EDGES = torch.empty(2, 0, dtype=torch.long)
DEVIATIONS = [2**0.5, (26 / 3) ** 0.5]  # of 1, 4, 1 and of -2, 0, 5


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mean", [2.0, 1.0]),
        ("sum", [6.0, 3.0]),
        ("max", [4.0, 5.0]),
        ("sum+mean+max", [6.0, 3.0, 2.0, 1.0, 4.0, 5.0]),
        ("mean-deviations", [2.0, 1.0, *DEVIATIONS]),
        ("vpa", [6 / 3**0.5, 3 / 3**0.5]),
    ],
)
def test_plain_readouts(name: str, expected: list[float]) -> None:
    x = torch.tensor([[9.0, 9.0], [1.0, -2.0], [4.0, 0.0], [1.0, 5.0]])
    readout = POOLS[name](2, 7)(x, NO_EDGES, torch.tensor([0, 1, 1, 1]), 2)
    torch.testing.assert_close(readout.vector[1], torch.tensor(expected))
    assert float(readout.loss) == 0


def test_vpa_keeps_the_variance_whatever_the_size() -> None:
    """Which the sum multiplies by the size, and the mean divides by it."""
    torch.manual_seed(0)
    for size in (1, 100):
        x = torch.randn(4000 // 4 * size, 4)
        vectors = POOLS["vpa"](4, 1)(x, NO_EDGES, torch.arange(1000).repeat_interleave(size), 1000).vector
        assert 0.9 < float(vectors.var()) < 1.1
