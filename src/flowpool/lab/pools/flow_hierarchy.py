"""FlowPool in two levels: twice as many points as asked for, a convolution between them, and then the points."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.nn import GCNConv

from flowpool.lab.pools.base import Pool, Readout, no_loss
from flowpool.nn.coarsen import FlowCoarsen
from flowpool.nn.pool import FlowPool as Layer


class FlowHierarchyPool(Pool):
    r"""Coarsens to 2 M points, lets them exchange messages over the coarse edges, and pools them to M.

    .. math:: (X_1, A_1) = \mathrm{coarsen}(Y, A), \quad
              X_2 = X_1 + \mathrm{ReLU}(\mathrm{GCN}(X_1, A_1)), \quad X^* = \mathrm{flow}(X_2)

    Soft coarse graphs are nearly complete, and a convolution alone would make the points nearly equal: hence the sum.
    The points are learned features and no longer stand for nodes, so this is no `PointPool`.
    """

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(num_points * in_channels)
        self.coarsen = FlowCoarsen(in_channels, 2 * num_points, seed=_drawn_seed())
        self.convolution = GCNConv(in_channels, in_channels)
        self.layer = Layer(in_channels, num_points, seed=_drawn_seed())

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        coarse = self.coarsen(x, edge_index, batch=batch, dim_size=num_graphs)
        messages = self.convolution(coarse.x, coarse.edge_index, coarse.edge_weight)  # (B * 2 M, D)
        vector = self.layer(coarse.x + messages.relu(), coarse.batch, dim_size=num_graphs)  # (B, M * D)
        return Readout(vector, no_loss(x))


def _drawn_seed() -> int:
    return int(torch.randint(2**31 - 1, ()))
