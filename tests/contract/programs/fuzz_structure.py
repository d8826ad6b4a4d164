"""Calls the pool with random batch vectors, offsets, sizes and masses; prints calls, results, refusals.

Anything but a result or a ValueError ends the program with an error, and so does a request for absurd memory.
"""

from __future__ import annotations

import random
import resource
import sys

import torch
from torch import Tensor

from flowpool import flow_pool

MEMORY = 6 * 2**30
EXTREMES = (-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 2**15 - 1, 2**31 - 2, 2**31 - 1, 2**31, 2**62, 2**63 - 1)
DTYPES = (torch.int64, torch.int64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.float32)
WEIGHTS = (0.0, 0.0, 1.0, 0.5, 2.0, 1e-300, 1e300, -1.0, float("nan"), float("inf"))


def integers(chance: random.Random, length: int, extreme: float, sort: bool) -> Tensor:
    values = [chance.choice(EXTREMES) if chance.random() < extreme else chance.randint(0, 4) for _ in range(length)]
    dtype = chance.choice(DTYPES)
    tensor = torch.tensor(sorted(values) if sort else values, dtype=torch.int64)
    return tensor.to(dtype)


def arguments(chance: random.Random, num_nodes: int) -> dict[str, object]:
    found: dict[str, object] = {}
    extreme = chance.choice((0.0, 0.0, 0.2))
    if chance.random() < 0.7:
        found["batch"] = integers(chance, max(0, num_nodes + chance.choice((0, 0, 0, 0, 1, -1))), extreme, False)
    if chance.random() < 0.35:
        ptr = integers(chance, chance.randint(0, 4), extreme, chance.random() < 0.7)
        if chance.random() < 0.6 and ptr.numel() > 1 and ptr.dtype in (torch.int64, torch.int32):
            ptr[0], ptr[-1] = 0, num_nodes
        found["ptr"] = ptr
    if chance.random() < 0.3:
        found["dim_size"] = chance.choice((-1, 0, 1, 3, 5, 6, 2**31, 2**40, 2**62))
    if chance.random() < 0.4:
        length = max(0, num_nodes + chance.choice((0, 0, 0, 0, 1)))
        some = WEIGHTS if chance.random() < 0.5 else WEIGHTS[1:5]
        found["masses"] = torch.tensor([chance.choice(some) for _ in range(length)], dtype=torch.float64)
    return found


def main() -> None:
    engine, calls = sys.argv[1], int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    chance = random.Random(0)  # noqa: S311 - test inputs
    reference = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    results = refused = 0
    for call in range(calls):
        num_nodes = chance.randint(0, 5)
        # One call in twenty has a cloud to solve; in the others all nodes are equal, which costs no flow.
        values = torch.arange(num_nodes).double() if call % 20 == 0 else torch.ones(num_nodes).double()
        options = arguments(chance, num_nodes)
        try:
            pooled = flow_pool(values[:, None], reference=reference, engine=engine, max_steps=1, **options)
        except ValueError:
            refused += 1
        except BaseException:
            print(f"call {call}: {num_nodes} nodes, {options}", file=sys.stderr)
            raise
        else:
            results += 1
            if not bool(pooled.points.isfinite().all()):
                raise RuntimeError(f"call {call}: {num_nodes} nodes, {options} gave {pooled.points}")
    print(calls, results, refused)


if __name__ == "__main__":
    main()
