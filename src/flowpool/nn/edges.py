"""Checks of edges that come with a batch of graphs."""

from __future__ import annotations

import torch
from torch import Tensor


def check_edges(edge_index: Tensor) -> None:
    """Raises unless ``edge_index`` is a ``(2, E)`` tensor of whole numbers."""
    if not isinstance(edge_index, Tensor) or edge_index.dtype != torch.int64:
        found = edge_index.dtype if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise TypeError(f"edge_index is {found}; pass an integer tensor (torch.long) of shape (2, num_edges).")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"edge_index has shape {tuple(edge_index.shape)}; expected (2, num_edges).")


def check_nodes(edge_index: Tensor, num_nodes: int) -> None:
    """Raises unless every edge joins nodes that are there."""
    outside = ((edge_index < 0) | (edge_index >= num_nodes)).any(0)
    if bool(outside.any()):
        edge = int(outside.nonzero()[0])
        raise ValueError(
            f"{int(outside.sum())} edges name nodes that are not there (first: edge {edge}, "
            f"{int(edge_index[0, edge])} to {int(edge_index[1, edge])}); the nodes are 0 to {num_nodes - 1}."
        )


def check_within(edge_index: Tensor, batch: Tensor) -> None:
    """Raises unless every edge stays in one graph, given the graph of each node ``(N,)``."""
    source, target = batch[edge_index]
    across = source != target
    if bool(across.any()):
        edge = int(across.nonzero()[0])
        raise ValueError(
            f"{int(across.sum())} edges join different graphs (first: edge {edge}, from graph {int(source[edge])} to "
            f"graph {int(target[edge])}). Give linked nodes the same graph in batch."
        )
