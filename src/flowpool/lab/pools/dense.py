"""Padded forms of a batch of graphs, for the methods that work on dense adjacency matrices."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.utils import to_dense_adj


def dense_adjacency(edge_index: Tensor, batch: Tensor, like: Tensor) -> Tensor:
    """Adjacency of each graph, ``(B, N, N)``, sized and typed as the padded nodes `like`, ``(B, N, D)``."""
    num_graphs, num_nodes, _ = like.shape
    adjacency: Tensor = to_dense_adj(edge_index, batch, max_num_nodes=num_nodes, batch_size=num_graphs)
    return adjacency.to(like.dtype)


def every_cluster(like: Tensor) -> Tensor:
    """Mask that keeps every row of a cloud ``(B, M, D)``: soft clusters exist in graphs of any size."""
    return torch.ones(like.shape[:2], dtype=torch.bool, device=like.device)
