from __future__ import annotations

import pytest
import torch

from flowpool.lab.pools import POOLS


@pytest.mark.parametrize(("name", "expected"), [("mean", [2.0, 1.0]), ("sum", [6.0, 3.0]), ("max", [4.0, 5.0])])
def test_plain_readouts(name: str, expected: list[float]) -> None:
    x = torch.tensor([[9.0, 9.0], [1.0, -2.0], [4.0, 0.0], [1.0, 5.0]])
    readout = POOLS[name](2, 7)(x, torch.empty(2, 0, dtype=torch.long), torch.tensor([0, 1, 1, 1]), 2)
    assert readout.vector.tolist() == [[9.0, 9.0], expected]
    assert float(readout.loss) == 0
