"""The same batch with 1, 2, 4 and 8 threads; prints the largest difference of any bit pattern, as a number."""

from __future__ import annotations

import sys

import torch

from flowpool import flow_pool, references


def passes(engine: str, sizes: list[int], num_points: int, max_steps: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), width, generator=generator, dtype=torch.float64).requires_grad_()
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    pooled = flow_pool(
        x, batch, reference=references.normal(width, num_points).double(), engine=engine, max_steps=max_steps
    )
    pooled.points.square().sum().backward()
    return torch.cat([pooled.points.detach().flatten(), x.grad.flatten(), pooled.residual])  # type: ignore[union-attr]


def main() -> None:
    engine, repeats = sys.argv[1], int(sys.argv[2])
    worst = 0.0
    problems = [
        ([5, 6, 7, 4], 2, 8, 2, repeats),  # a batch of small graphs
        ([400] * 12, 4, 1, 8, 1),  # large enough for torch to share the work
        ([60_000], 2, 1, 2, 1),  # one graph alone
    ]
    for sizes, num_points, max_steps, width, times in problems:
        expected = None
        for threads in (1, 2, 4, 8):
            torch.set_num_threads(threads)
            for _ in range(times):
                found = passes(engine, sizes, num_points, max_steps, width)
                expected = found if expected is None else expected
                if not torch.equal(found, expected):
                    worst = max(worst, float((found - expected).abs().max()))
                    print(f"{len(sizes)} graphs, {threads} threads: {worst}", file=sys.stderr)
            if torch.get_num_threads() != threads:
                raise RuntimeError(f"{torch.get_num_threads()} threads after a call with {threads}")
    print(worst)


if __name__ == "__main__":
    main()
