"""Wasserstein embedding for graph learning (Kolouri et al., 2021): transport maps of a fixed reference."""

from __future__ import annotations

import math

import ot
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from flowpool.lab.pools.base import Cloud, PointPool, Readout, graph_sizes, no_loss
from flowpool.lab.pools.dense import every_cluster


class WEGLPool(PointPool):
    """Where exact transport sends M k-means centres of training nodes, minus the centres, over sqrt(M).

    The method is frozen by design: it has no parameters and passes no gradient to the nodes, so whatever
    lies before it is not trained through it. Call `fit` with the training nodes first.
    """

    reference: Tensor
    is_fitted: Tensor

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(num_points * in_channels)
        self.register_buffer("reference", torch.zeros(num_points, in_channels))
        self.register_buffer("is_fitted", torch.tensor(False))
        self.kmeans_seed = int(torch.randint(2**31 - 1, ()))

    def fit(self, x: Tensor, batch: Tensor) -> None:
        num_points = len(self.reference)
        if len(x) < num_points:
            raise ValueError(f"{len(x)} training nodes cannot give {num_points} k-means centres. Pass more nodes.")
        kmeans = KMeans(num_points, n_init=10, random_state=self.kmeans_seed)
        kmeans.fit(x.detach().double().cpu().numpy())
        self.reference.copy_(torch.from_numpy(kmeans.cluster_centers_))
        self.is_fitted.fill_(True)

    @torch.no_grad()
    def cloud(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Cloud:
        if not self.is_fitted:
            raise RuntimeError(
                "This pool has no reference yet. Call fit(x, batch) with the nodes of the training graphs."
            )
        images = [self._barycentric_map(nodes) for nodes in x.split(graph_sizes(batch, num_graphs).tolist())]
        points = torch.stack(images)  # (B, M, D)
        return Cloud(points, every_cluster(points), no_loss(x))

    @torch.no_grad()
    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        cloud = self.cloud(x, edge_index, batch, num_graphs)
        displacement = (cloud.points - self.reference) / math.sqrt(len(self.reference))
        return Readout(displacement.flatten(1), cloud.loss)

    def _barycentric_map(self, nodes: Tensor) -> Tensor:
        num_points = len(self.reference)
        cost = ot.dist(self.reference.double(), nodes.double())  # (M, N)
        point_masses = cost.new_full((num_points,), 1 / num_points)
        node_masses = cost.new_full((len(nodes),), 1 / len(nodes))
        plan: Tensor = ot.emd(point_masses, node_masses, cost)  # (M, N)
        return (num_points * plan @ nodes.double()).to(nodes.dtype)  # (M, D)
