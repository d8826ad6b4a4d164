"""One call that takes long; says when it starts, and that it was interrupted."""

from __future__ import annotations

import signal
import sys
from typing import Any

import torch

from flowpool import flow_pool, references


def main() -> None:
    # A shell hands its background jobs an interrupt that is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    engine, num_nodes = sys.argv[1], int(sys.argv[2])
    x = torch.randn(num_nodes, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    reference = references.normal(64, 32).double()
    flow_pool(x[:20, :2], reference=reference[:, :2], engine=engine, max_steps=2)  # loads what loads late
    print("started", flush=True)
    try:
        stalling: dict[str, Any] = {"tolerance": 1e-300} if engine == "compiled" else {"step_size": 1e-9}
        flow_pool(x, reference=reference, engine=engine, max_steps=10**9, **stalling)
    except KeyboardInterrupt:
        print("interrupted", flush=True)


if __name__ == "__main__":
    main()
