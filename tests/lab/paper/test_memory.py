"""The meter of tensor memory, on computations whose peak is known."""

import torch

from flowpool.lab.paper.memory import TensorMemory


def test_dead_tensors_do_not_count() -> None:
    with TensorMemory() as meter:
        for _ in range(5):
            first = torch.zeros(1000, dtype=torch.float64)
            second = first.view(10, 100) + 1  # the view is not new memory
            del first, second
    assert meter.peak == 2 * 8000


def test_what_autograd_keeps_counts() -> None:
    start = torch.ones(1000, dtype=torch.float64, requires_grad=True)
    with TensorMemory() as meter:
        value = start
        for _ in range(50):
            value = value.exp()  # kept for the backward pass
    assert abs(meter.peak / (50 * 8000) - 1) < 0.03
