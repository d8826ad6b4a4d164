"""Optimal transport kernel embedding (Mialon et al., 2021): nodes pooled by a plan to a learned reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch_geometric.utils import to_dense_batch

from flowpool.lab.pools.base import Cloud, PointPool, Readout, no_loss
from flowpool.lab.pools.dense import every_cluster
from flowpool.lab.pools.scaling import transport_plan


class OTKEPool(PointPool):
    r"""Embedding with one reference Z of M points and the linear kernel, whose feature map is the identity.

    .. math::
        P = \arg\max_{P \in U(1/N, 1/M)} \langle P, Y Z^\top \rangle + \varepsilon H(P), \qquad
        \Phi(Y) = \sqrt{M} \, P^\top Y

    The cloud is M P^T Y, the barycentres of the nodes sent to each reference point: the readout times
    sqrt(M).
    """

    def __init__(self, in_channels: int, num_points: int, epsilon: float = 0.5) -> None:
        super().__init__(num_points * in_channels)
        self.epsilon = epsilon
        self.reference = nn.Parameter(torch.randn(num_points, in_channels) / math.sqrt(in_channels))

    def plan(self, nodes: Tensor, mask: Tensor) -> Tensor:
        """Transport plan of each graph, ``(B, N, M)``, of padded nodes ``(B, N, D)`` with mask ``(B, N)``."""
        scores = nodes @ self.reference.mT / self.epsilon  # (B, N, M)
        scores = scores.masked_fill(~mask.unsqueeze(2), -math.inf)
        node_masses = mask / mask.sum(1, keepdim=True).to(nodes.dtype)  # (B, N)
        num_points = len(self.reference)
        point_masses = nodes.new_full((len(nodes), num_points), 1 / num_points)  # (B, M)
        return transport_plan(scores, node_masses, point_masses)

    def cloud(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Cloud:
        nodes, mask = to_dense_batch(x, batch, batch_size=num_graphs)  # (B, N, D), (B, N)
        points = len(self.reference) * self.plan(nodes, mask).mT @ nodes  # (B, M, D)
        return Cloud(points, every_cluster(points), no_loss(x))

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        cloud = self.cloud(x, edge_index, batch, num_graphs)
        return Readout(cloud.points.flatten(1) / math.sqrt(len(self.reference)), cloud.loss)
