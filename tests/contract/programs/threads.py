"""A forward and backward pass of a batch; prints how many helper threads it made, how many worked, and torch's number."""

from __future__ import annotations

import sys
import threading

import torch

from flowpool import flow_pool, references


def main() -> None:
    engine = sys.argv[1]
    torch.set_num_threads(int(sys.argv[2]))
    workers: set[int] = set()
    if engine == "compiled":
        from flowpool.kernels import batch as kernels

        solve = kernels.solve_graphs

        def watched(*arguments: object) -> None:
            workers.add(threading.get_ident())
            solve(*arguments)

        kernels.solve_graphs = watched  # type: ignore[assignment]
    else:
        workers.add(threading.get_ident())
    x = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    batch = torch.arange(20).repeat_interleave(100)
    reference = references.normal(8, 4)
    flow_pool(x, batch, reference=reference, engine=engine, max_steps=3).points.sum().backward()
    helpers = [thread for thread in threading.enumerate() if thread.name.startswith("flowpool")]
    print(len(helpers), len(workers), torch.get_num_threads())


if __name__ == "__main__":
    main()
