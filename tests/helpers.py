"""Clouds and graphs with known answers, shared by the tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowpool.lab.datasets import load_dataset


def simplex(*shape: int, generator: torch.Generator) -> Tensor:
    """Random positive masses that sum to one along the last axis."""
    masses = torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.2
    return masses / masses.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Pair:
    """A batch of random clouds X and Y with non-uniform masses."""

    points: Tensor  # (B, M, D)
    nodes: Tensor  # (B, N, D)
    point_masses: Tensor
    masses: Tensor


def random_pair(batch: int = 3, num_points: int = 4, num_nodes: int = 7, dim: int = 3, seed: int = 0) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(batch, num_points, dim, generator=generator, dtype=torch.float64)
    nodes = torch.randn(batch, num_nodes, dim, generator=generator, dtype=torch.float64)
    return Pair(
        points,
        nodes,
        simplex(batch, num_points, generator=generator),
        simplex(batch, num_nodes, generator=generator),
    )


def mutag_clouds(width: int | None = None, count: int = 188, seed: int = 0) -> tuple[Tensor, Tensor]:
    """SGC-propagated (K = 2) one-hot features of MUTAG, through a random linear layer if asked, and each node's graph.

    Float64 ``(N, width or 7)`` and ``(N,)``.
    """
    dataset = load_dataset("MUTAG")
    batch = dataset.batch(range(count))
    features = batch.x.double()
    edges, num_nodes = batch.edge_index, len(batch.x)
    degree = torch.bincount(edges[0], minlength=num_nodes).double() + 1
    for _ in range(2):
        scaled = features / degree.sqrt()[:, None]
        summed = scaled + torch.zeros_like(scaled).index_add(0, edges[0], scaled[edges[1]])
        features = summed / degree.sqrt()[:, None]
    if width is not None:
        generator = torch.Generator().manual_seed(seed)
        features = features @ torch.randn(7, width, generator=generator, dtype=torch.float64) / 7**0.5
    return features, batch.batch


def central_difference(function, value: Tensor, direction: Tensor, step: float = 1e-5) -> Tensor:
    """Derivative of ``function`` at ``value`` along ``direction``, to fourth order."""
    near = function(value + step * direction) - function(value - step * direction)
    far = function(value + 2 * step * direction) - function(value - 2 * step * direction)
    return (8 * near - far) / (12 * step)
