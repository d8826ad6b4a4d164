"""StructPool (Yuan and Ji, 2020): M clusters whose assignments are tied to each other by a random field."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv
from torch_geometric.utils import to_dense_batch

from flowpool.lab.pools.base import Cloud, PointPool, no_loss
from flowpool.lab.pools.dense import dense_adjacency, every_cluster

NUM_ITERATIONS = 5
NUM_HOPS = 3


class StructPool(PointPool):
    r"""Assignments by mean field inference in a conditional random field on the nodes, pooled as S^T X.

    .. math::
        S^{(0)} = \mathrm{softmax}(U), \qquad S^{(t+1)} = \mathrm{softmax}(U - W S^{(t)} \mu)

    U are the scores of a graph convolution (unary energies, sign reversed), W attention between nodes that
    are at most three hops apart, mu the learned M x M compatibility of clusters. mu starts at minus the
    identity: related nodes prefer the same cluster.

    The paper divides inner products by their row sum to get W. Features here may be negative, so that the
    sum may vanish; W is the softmax of the scaled inner products instead.
    """

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(num_points * in_channels)
        self.unary = GCNConv(in_channels, num_points)
        self.compatibility = nn.Parameter(-torch.eye(num_points))

    def assignment(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Tensor:
        """Cluster probabilities of the padded nodes, ``(B, N, M)``; rows sum to one, padded rows are zero."""
        unary, _ = to_dense_batch(self.unary(x, edge_index), batch, batch_size=num_graphs)  # (B, N, M)
        nodes, mask = to_dense_batch(x, batch, batch_size=num_graphs)  # (B, N, D), (B, N)
        related = within_hops(dense_adjacency(edge_index, batch, nodes), NUM_HOPS)  # (B, N, N)
        attention = masked_attention(nodes, related)  # (B, N, N)
        marginals: Tensor = unary.softmax(2)
        for _ in range(NUM_ITERATIONS):
            marginals = (unary - attention @ marginals @ self.compatibility).softmax(2)
        return torch.where(mask.unsqueeze(2), marginals, 0)

    def cloud(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Cloud:
        nodes, _ = to_dense_batch(x, batch, batch_size=num_graphs)  # (B, N, D)
        points = self.assignment(x, edge_index, batch, num_graphs).mT @ nodes  # (B, M, D)
        return Cloud(points, every_cluster(points), no_loss(x))


def within_hops(adjacency: Tensor, num_hops: int) -> Tensor:
    """Which pairs of different nodes are at most `num_hops` edges apart, ``(B, N, N)`` bool."""
    itself = torch.eye(adjacency.shape[1], dtype=adjacency.dtype, device=adjacency.device)
    step = ((adjacency + itself) > 0).to(adjacency.dtype)
    reached = step
    for _ in range(num_hops - 1):
        # Back to 0 and 1 each time: numbers of walks overflow in large dense graphs.
        reached = (reached @ step > 0).to(adjacency.dtype)
    return (reached > 0) & (itself == 0)


def masked_attention(nodes: Tensor, related: Tensor) -> Tensor:
    """Softmax attention of each node to its related nodes, ``(B, N, N)``; a zero row where there are none."""
    scores = nodes @ nodes.mT / math.sqrt(nodes.shape[2])  # (B, N, N)
    # The most negative finite number, not minus infinity: a row without relatives then stays free of NaN.
    weights = scores.masked_fill(~related, torch.finfo(scores.dtype).min).softmax(2)
    return weights * related
