"""Processor time and wall time of a few calls, in seconds, and the number of threads the process then has."""

from __future__ import annotations

import os
import sys
import time

import torch

from flowpool import flow_pool, references


def main() -> None:
    engine = sys.argv[1]
    x = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    batch = torch.arange(10).repeat_interleave(200)
    begin = time.perf_counter(), time.process_time()
    flow_pool(x, batch, reference=references.normal(8, 4), engine=engine, max_steps=1).points.sum().backward()
    wall, processor = time.perf_counter() - begin[0], time.process_time() - begin[1]
    print(processor, wall, len(os.listdir("/proc/self/task")))


if __name__ == "__main__":
    main()
