"""Optimal transport kernel embedding (Mialon et al., 2021): nodes pooled by a plan to a learned reference."""

from __future__ import annotations

import math

import torch
from sklearn.cluster import KMeans
from torch import Tensor, nn
from torch_geometric.utils import to_dense_batch

from flowpool.lab.pools.base import Cloud, PointPool, Readout, no_loss
from flowpool.lab.pools.dense import every_cluster
from flowpool.lab.pools.scaling import transport_plan

# Of the kernel's diagonal, which is one: keeps its matrix definite when anchors have come together.
JITTER = 1e-6


class OTKEPool(PointPool):
    r"""Embedding with one reference Z of M points and the Gaussian kernel, by its Nystroem features.

    .. math::
        \kappa(y, w) = e^{-|y - w|^2 / 2 \sigma^2}, \qquad \psi(y) = L^{-1} \kappa(W, y), \quad L L^\top = \kappa(W, W)

        P = \arg\max_{P \in U(1/N, 1/M)} \langle P, \psi(Y) Z^\top \rangle + \varepsilon H(P), \qquad
        \Phi(Y) = \sqrt{M} \, P^\top \psi(Y)

    There are as many anchors W as features, so that the vector has the size M * D of the other methods. `fit` puts
    anchors and reference to k-means centres of the training nodes and of their features, and sigma to the spread of
    the nodes; anchors and reference are then learned. The triangular factor in place of the symmetric root turns the
    features, which a linear head does not notice, and has a gradient when eigenvalues meet.

    The cloud is M P^T Y, the barycentres of the nodes sent to each reference point.
    """

    bandwidth: Tensor

    def __init__(self, in_channels: int, num_points: int, epsilon: float = 0.5) -> None:
        super().__init__(num_points * in_channels)
        self.epsilon = epsilon
        self.anchors = nn.Parameter(torch.randn(in_channels, in_channels))  # (K, D)
        self.reference = nn.Parameter(torch.randn(num_points, in_channels) / math.sqrt(in_channels))  # (M, K)
        self.register_buffer("bandwidth", torch.ones(()))
        self.kmeans_seed = int(torch.randint(2**31 - 1, ()))

    @torch.no_grad()
    def fit(self, x: Tensor, batch: Tensor) -> None:
        spread = (x - x.mean(0)).square().sum(1).mean().sqrt()
        self.bandwidth.copy_(spread if spread > 0 else torch.ones_like(spread))
        self.anchors.copy_(self._centres(x, len(self.anchors)))
        self.reference.copy_(self._centres(self.features(x), len(self.reference)))

    def features(self, nodes: Tensor) -> Tensor:
        """psi of nodes ``(..., D)``, ``(..., K)``; inner products of these approximate the kernel."""
        among = self._kernel(self.anchors) + JITTER * torch.eye(len(self.anchors)).to(self.anchors)  # (K, K)
        factor = torch.linalg.cholesky(among)
        rows = self._kernel(nodes).unsqueeze(-1)  # (..., K, 1)
        solved: Tensor = torch.linalg.solve_triangular(factor, rows, upper=False)
        return solved.squeeze(-1)

    def plan(self, features: Tensor, mask: Tensor) -> Tensor:
        """Transport plan of each graph, ``(B, N, M)``, of padded features ``(B, N, K)`` with mask ``(B, N)``."""
        scores = features @ self.reference.mT / self.epsilon  # (B, N, M)
        scores = scores.masked_fill(~mask.unsqueeze(2), -math.inf)
        node_masses = mask / mask.sum(1, keepdim=True).to(features.dtype)  # (B, N)
        num_points = len(self.reference)
        point_masses = features.new_full((len(features), num_points), 1 / num_points)  # (B, M)
        return transport_plan(scores, node_masses, point_masses)

    def cloud(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Cloud:
        nodes, mask = to_dense_batch(x, batch, batch_size=num_graphs)  # (B, N, D), (B, N)
        points = len(self.reference) * self.plan(self.features(nodes), mask).mT @ nodes  # (B, M, D)
        return Cloud(points, every_cluster(points), no_loss(x))

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        nodes, mask = to_dense_batch(x, batch, batch_size=num_graphs)  # (B, N, D), (B, N)
        features = self.features(nodes)  # (B, N, K)
        embedded = math.sqrt(len(self.reference)) * self.plan(features, mask).mT @ features  # (B, M, K)
        return Readout(embedded.flatten(1), no_loss(x))

    def _kernel(self, nodes: Tensor) -> Tensor:
        """kappa(nodes, W), ``(..., K)``."""
        differences = (nodes.unsqueeze(-2) - self.anchors) / self.bandwidth  # (..., K, D)
        return (-0.5 * differences.square().sum(-1)).exp()

    def _centres(self, rows: Tensor, count: int) -> Tensor:
        if len(rows) < count:
            raise ValueError(f"{len(rows)} training nodes cannot give {count} k-means centres. Pass more nodes.")
        kmeans = KMeans(count, n_init=10, random_state=self.kmeans_seed)
        return torch.from_numpy(kmeans.fit(rows.double().cpu().numpy()).cluster_centers_)
