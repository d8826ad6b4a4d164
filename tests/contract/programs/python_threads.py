"""Eight Python threads that pool at once; prints how many calls differ from the serial result."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from flowpool import flow_pool, references


def main() -> None:
    engine, calls = sys.argv[1], int(sys.argv[2])
    reference = references.normal(2, 2).double()
    clouds = [torch.randn(4 + k, 2, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in range(8)]

    def once(thread: int, backward: bool) -> list[torch.Tensor]:
        x = clouds[thread].clone().requires_grad_(backward)
        points = flow_pool(x, reference=reference, engine=engine, epsilon=10.0, max_steps=1).points
        if not backward:
            return [points]
        points.square().sum().backward()
        return [points.detach(), x.grad]  # type: ignore[list-item]

    expected = [once(thread, True) for thread in range(8)]

    def many(thread: int) -> int:
        wrong = 0
        for call in range(calls):
            found = once(thread, call % 10 == 0)
            wrong += not all(torch.equal(a, b) for a, b in zip(found, expected[thread], strict=False))
        return wrong

    with ThreadPoolExecutor(8) as executor:
        print(sum(executor.map(many, range(8))))


if __name__ == "__main__":
    main()
