"""Set Transformer readout (Lee et al., 2019; Buterez et al., 2022): attention blocks around M seeds."""

from __future__ import annotations

from torch import Tensor
from torch_geometric.nn.aggr import SetTransformerAggregation

from flowpool.lab.pools.base import Pool, Readout, no_loss


class SetTransformerPool(Pool):
    """PyG's SetTransformerAggregation with one head; the M seed embeddings are concatenated."""

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(num_points * in_channels)
        self.aggregation = SetTransformerAggregation(in_channels, num_seed_points=num_points)

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        return Readout(self.aggregation(x, batch, dim_size=num_graphs), no_loss(x))
