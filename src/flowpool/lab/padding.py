"""Graphs padded to one size with rows of zeros, as programs with fixed shapes do.

What such a row weighs decides what a pool sees. With no mass it is not there, whatever the pool. With the mass of a
node, every graph is a measure with mass 1 - N / N_max at the origin, and so carries its own size: a flow has points
there, a mean shrinks, a sort may keep zeros, and only a sum does not change.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowpool.lab.pools.base import graph_sizes


class Padded(NamedTuple):
    """The arguments of a pool for graphs of one size."""

    nodes: Tensor  # (B * width, D)
    edge_index: Tensor  # (2, E)
    batch: Tensor  # (B * width,)
    is_node: Tensor  # (B * width,) bool, False in the rows that were added


def pad(nodes: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int, width: int) -> Padded:
    """Each graph with rows of zeros after its own, ``width`` rows in all.

    Args:
        nodes: ``(N, D)``.
        edge_index: ``(2, E)``.
        batch: graph of each node, sorted, ``(N,)``.
        num_graphs: number of graphs, B.
        width: at least the number of nodes of the largest graph.
    """
    sizes = graph_sizes(batch, num_graphs)
    if int(sizes.max()) > width:
        raise ValueError(f"A graph has {int(sizes.max())} nodes; it cannot be padded to {width}.")
    first = sizes.cumsum(0) - sizes  # (B,)
    place = torch.arange(len(batch), device=batch.device) - first[batch] + width * batch  # (N,)
    dense = nodes.new_zeros(num_graphs * width, nodes.shape[1]).index_copy(0, place, nodes)
    is_node = torch.zeros(num_graphs * width, dtype=torch.bool, device=batch.device).index_fill(0, place, True)
    owner = torch.arange(num_graphs, device=batch.device).repeat_interleave(width)
    return Padded(dense, place[edge_index], owner, is_node)
