"""DiffPool (Ying et al., 2018): M clusters with soft assignments from a graph convolution."""

from __future__ import annotations

from torch import Tensor
from torch_geometric.nn import GCNConv
from torch_geometric.nn.dense import dense_diff_pool
from torch_geometric.utils import to_dense_batch

from flowpool.lab.pools.base import Cloud, PointPool
from flowpool.lab.pools.dense import dense_adjacency, every_cluster


class DiffPool(PointPool):
    """PyG's dense_diff_pool. The points are S^T X, sums over the nodes; loss: links plus entropy."""

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(num_points * in_channels)
        self.assignment = GCNConv(in_channels, num_points)

    def cloud(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Cloud:
        scores, _ = to_dense_batch(self.assignment(x, edge_index), batch, batch_size=num_graphs)  # (B, N, M)
        nodes, mask = to_dense_batch(x, batch, batch_size=num_graphs)  # (B, N, D), (B, N)
        adjacency = dense_adjacency(edge_index, batch, nodes)  # (B, N, N)
        points, _, link_loss, entropy_loss = dense_diff_pool(nodes, adjacency, scores, mask)
        return Cloud(points, every_cluster(points), link_loss + entropy_loss)
