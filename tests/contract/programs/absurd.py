"""Asks for more memory than any machine has; prints the type and the text of what is raised."""

from __future__ import annotations

import resource
import sys

import torch

from flowpool import flow_pool

LIMIT = 8 * 2**30


def main() -> None:
    engine, case = sys.argv[1:3]
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    one = torch.ones(1, 1, dtype=torch.float64)
    many = torch.arange(400_000).double()[:, None]
    calls = {
        "points": (many, {"reference": many}),
        "ids": (one, {"reference": one, "batch": torch.tensor([2**31 - 2])}),
        "dim_size": (one, {"reference": one, "batch": torch.tensor([0]), "dim_size": 2**40}),
    }
    x, options = calls[case]
    try:
        flow_pool(x, engine=engine, max_steps=1, **options)  # type: ignore[arg-type]
    except Exception as error:
        print(type(error).__name__, str(error).replace("\n", " "))
    else:
        print("nothing was raised")


if __name__ == "__main__":
    main()
