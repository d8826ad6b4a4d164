"""Pools in DataLoader workers after the parent has pooled; prints the number of rows that came back equal."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flowpool import flow_pool, references


def pooled(engine: str, seed: int) -> Tensor:
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()
    points = flow_pool(x, reference=references.normal(2, 2).double(), engine=engine).points
    points.square().sum().backward()
    return torch.cat([points.detach().flatten(), x.grad.flatten()])  # type: ignore[union-attr]


class PooledGraphs(Dataset[Tensor]):
    """Graphs that are pooled, and differentiated, when they are fetched."""

    def __init__(self, engine: str) -> None:
        self.engine = engine

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return pooled(self.engine, index)


def main() -> None:
    engine, method = sys.argv[1:3]
    torch.set_num_threads(2)
    expected = [pooled(engine, seed) for seed in range(4)]
    torch.randn(300, 300) @ torch.randn(300, 300)  # wakes the threads that a fork leaves behind
    loader = DataLoader(PooledGraphs(engine), batch_size=None, num_workers=2, multiprocessing_context=method)
    print(sum(torch.equal(found, other) for found, other in zip(loader, expected, strict=True)))


if __name__ == "__main__":
    main()
