"""DiffPool (Ying et al., 2018): M clusters with soft assignments from one graph network, features from another."""

from __future__ import annotations

from torch import Tensor
from torch_geometric.nn import GraphSAGE
from torch_geometric.nn.dense import dense_diff_pool
from torch_geometric.utils import to_dense_batch

from flowpool.lab.pools.base import Pool, Readout
from flowpool.lab.pools.dense import dense_adjacency

NUM_LAYERS = 3


class DiffPool(Pool):
    r"""PyG's dense_diff_pool with the two networks of the paper, GraphSAGE of three layers each.

    .. math:: Z = \mathrm{GNN}_{embed}(A, X), \quad S = \mathrm{softmax}(\mathrm{GNN}_{pool}(A, X)), \quad X' = S^\top Z

    The loss is that of links plus entropy. The rows of X' are learned features, which do not stand for nodes, so this
    is no `PointPool`. Without the BatchNorm inside of the networks: a graph would depend on its company.
    """

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(num_points * in_channels)
        self.embedding = GraphSAGE(in_channels, in_channels, NUM_LAYERS)
        self.assignment = GraphSAGE(in_channels, in_channels, NUM_LAYERS, out_channels=num_points)

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        scores, _ = to_dense_batch(self.assignment(x, edge_index), batch, batch_size=num_graphs)  # (B, N, M)
        nodes, mask = to_dense_batch(self.embedding(x, edge_index), batch, batch_size=num_graphs)  # (B, N, D), (B, N)
        adjacency = dense_adjacency(edge_index, batch, nodes)  # (B, N, N)
        rows, _, link_loss, entropy_loss = dense_diff_pool(nodes, adjacency, scores, mask)  # (B, M, D)
        return Readout(rows.flatten(1), link_loss + entropy_loss)
