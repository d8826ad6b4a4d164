"""Forks children, which pool, while other threads pool; prints how many of them found what the parent did."""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch
from torch import Tensor

from flowpool import flow_pool, references

CHILDREN = 12


def pooled(engine: str) -> Tensor:
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    batch = torch.arange(8).repeat_interleave(5)
    points = flow_pool(x, batch, reference=references.normal(2, 2).double(), engine=engine).points
    points.square().sum().backward()
    return torch.cat([points.detach().flatten(), x.grad.flatten()])  # type: ignore[union-attr]


def main() -> None:
    engine = sys.argv[1]
    torch.set_num_threads(2)
    expected, done = pooled(engine), threading.Event()

    def keep_pooling() -> None:
        while not done.is_set():
            pooled(engine)

    workers = [threading.Thread(target=keep_pooling, daemon=True) for _ in range(2)]
    for worker in workers:
        worker.start()
    right = 0
    for _ in range(CHILDREN):
        child = os.fork()
        if child == 0:
            same = False
            try:
                signal.alarm(60)  # a child that waits for a thread of its parent would wait for ever
                same = torch.equal(pooled(engine), expected)
            finally:
                os._exit(0 if same else 1)
        right += os.waitpid(child, 0)[1] == 0
    done.set()
    for worker in workers:
        worker.join()
    print(right)


if __name__ == "__main__":
    main()
