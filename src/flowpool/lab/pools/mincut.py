"""MinCutPool (Bianchi et al., 2020): M clusters from the features, trained towards a small normalised cut."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.nn import MLP
from torch_geometric.nn.dense import dense_mincut_pool
from torch_geometric.utils import to_dense_batch

from flowpool.lab.pools.base import Cloud, PointPool
from flowpool.lab.pools.dense import dense_adjacency, every_cluster


class MinCutPool(PointPool):
    r"""PyG's dense_mincut_pool with assignments from an MLP with one hidden layer, as in the paper.

    .. math:: S = \mathrm{softmax}(\mathrm{ReLU}(X W_1 + b_1) W_2 + b_2)

    The points are S^T X, sums over the nodes; loss: cut plus orthogonality.
    """

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(num_points * in_channels)
        self.assignment = MLP([in_channels, in_channels, num_points], norm=None)

    def cloud(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Cloud:
        nodes, mask = to_dense_batch(x, batch, batch_size=num_graphs)  # (B, N, D), (B, N)
        adjacency = dense_adjacency(edge_index, batch, nodes)  # (B, N, N)
        # A self-loop on isolated nodes: no cut can separate them from anything. Without it the cut of a graph
        # without edges is 0 / 0.
        isolated = mask & (adjacency.sum(-1) == 0)
        adjacency = adjacency + torch.diag_embed(isolated.to(x.dtype))
        points, _, cut_loss, orthogonality_loss = dense_mincut_pool(nodes, adjacency, self.assignment(nodes), mask)
        return Cloud(points, every_cluster(points), cut_loss + orthogonality_loss)
