"""Peak memory of a forward and backward pass with few and with many steps; prints both in bytes, and the steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from flowpool import flow_pool, references


def peak() -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split("VmHWM:")[1].split()[0])


def measured(engine: str, max_steps: int) -> tuple[int, int]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8 * 150, 4, generator=generator, dtype=torch.float64).requires_grad_()
    batch = torch.arange(8).repeat_interleave(150)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = peak()
    # Such short steps, or so small a tolerance, cannot be met: the cap alone ends the flow.
    stalling: dict[str, Any] = {"tolerance": 1e-300} if engine == "compiled" else {"step_size": 1e-4}
    pooled = flow_pool(
        x, batch, reference=references.normal(4, 4).double(), engine=engine, max_steps=max_steps, **stalling
    )
    pooled.points.sum().backward()
    return peak() - before, int(pooled.steps.max())


def main() -> None:
    engine = sys.argv[1]
    measured(engine, 10)  # what is allocated once and for all
    few, few_steps = measured(engine, 10)
    many, many_steps = measured(engine, 1000)
    print(few, many, few_steps, many_steps)


if __name__ == "__main__":
    main()
