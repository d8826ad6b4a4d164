"""Growth of the resident memory over many forward and backward passes, in bytes."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch

from flowpool import flow_pool, references


def resident() -> int:
    gc.collect()
    return 1024 * int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def main() -> None:
    engine, passes = sys.argv[1], int(sys.argv[2])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 2, generator=generator, dtype=torch.float64).requires_grad_()
    batch, reference = torch.tensor([0] * 5 + [1] * 4), references.normal(2, 2).double()

    def once() -> None:
        # One step at a large epsilon: a leak is per call, not per step.
        pooled = flow_pool(x, batch, reference=reference, engine=engine, epsilon=10.0, max_steps=1, tolerance=0.1)
        pooled.points.sum().backward()
        x.grad = None

    for _ in range(200):
        once()
    before = resident()
    for _ in range(passes):
        once()
    print(resident() - before)


if __name__ == "__main__":
    main()
