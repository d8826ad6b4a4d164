"""One graph of very many nodes and 64 points; prints whether the points are finite and have the nodes' mean."""

from __future__ import annotations

import sys

import torch

from flowpool import flow_pool, references


def main() -> None:
    engine = sys.argv[1]
    x = torch.randn(int(sys.argv[2]), 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pooled = flow_pool(
        x, reference=references.normal(1, 64).double(), engine=engine, epsilon=10.0, max_steps=1, gradient="none"
    )
    print(int(pooled.points.isfinite().all()), float((pooled.points.mean() - x.mean()).abs()), int(pooled.status[0]))


if __name__ == "__main__":
    main()
