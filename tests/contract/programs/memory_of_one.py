"""Peak memory of a forward and backward pass on one large float32 graph, beyond the nodes; prints it and their number."""

from __future__ import annotations

from pathlib import Path

import torch

from flowpool import flow_pool, references


def resident(name: str) -> int:
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


def pool(nodes: torch.Tensor) -> None:
    reference = references.normal(nodes.shape[1], 16)
    pooled = flow_pool(nodes.requires_grad_(), reference=reference, engine="compiled", max_steps=2)
    pooled.points.sum().backward()


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    nodes = torch.randn(100_000, 16, generator=generator)
    pool(torch.randn(1000, 16, generator=generator))  # what is allocated once and for all
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = resident("VmRSS")
    pool(nodes)
    print(resident("VmHWM") - before, len(nodes))


if __name__ == "__main__":
    main()
