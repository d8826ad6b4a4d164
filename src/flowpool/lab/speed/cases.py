"""Batches that the peers are timed on: real graphs behind a random network, and one large cloud."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowpool.lab.backbones import prepare
from flowpool.lab.datasets import GraphBatch, load_dataset

GRAPH_CASES = (("MUTAG", 8, 5), ("NCI1", 64, 8), ("DD", 32, 16))  # dataset, d, M


@dataclass(frozen=True)
class Case:
    """Node features ``(N, D)`` in float32 and the graph of each node, to be pooled to M points."""

    name: str
    nodes: Tensor
    batch: Tensor
    num_graphs: int
    num_points: int

    @property
    def width(self) -> int:
        return self.nodes.shape[1]

    def describe(self) -> str:
        mean = len(self.nodes) / self.num_graphs
        return (
            f"{self.name}: {self.num_graphs} graphs, {mean:.0f} nodes on average, d={self.width}, M={self.num_points}"
        )


def graph_case(name: str, width: int, num_points: int, count: int = 32, data: str | None = None) -> Case:
    """Graphs of a dataset, drawn with a seed: a random linear layer after SGC for MUTAG, a random GIN elsewhere."""
    dataset = load_dataset(name, data, download=False)
    chosen = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[:count].tolist()
    generator = torch.Generator().manual_seed(1)
    if name == "MUTAG":
        batch = prepare(dataset, "sgc", "normalised").batch(chosen)
        nodes = batch.x @ torch.randn(batch.x.shape[1], width, generator=generator) / batch.x.shape[1] ** 0.5
    else:
        batch = dataset.batch(chosen)
        nodes = random_gin(batch, width, generator)
    return Case(name, nodes.float().contiguous(), batch.batch, count, num_points)


def random_gin(batch: GraphBatch, width: int, generator: torch.Generator) -> Tensor:
    """Features behind a GIN of two layers with random weights, ``(N, width)``."""
    nodes = batch.x
    for _ in range(2):
        summed = nodes.index_add(0, batch.edge_index[1], nodes[batch.edge_index[0]])
        for _ in range(2):
            weight = torch.randn(summed.shape[1], width, generator=generator) * (2 / summed.shape[1]) ** 0.5
            summed = (summed @ weight).relu()
        nodes = summed / summed.std()
    return nodes


def large_case(size: int, width: int = 16, num_points: int = 16) -> Case:
    """One cloud of ``size`` nodes: a mixture of sixteen Gaussians."""
    generator = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(16, width, generator=generator)
    kind = torch.randint(16, (size,), generator=generator)
    nodes = centres[kind] + torch.randn(size, width, generator=generator)
    return Case(f"n={size:,}", nodes, torch.zeros(size, dtype=torch.long), 1, num_points)
