"""Principal neighbourhood aggregation as a readout (Corso et al., 2020)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.nn.aggr import DegreeScalerAggregation

from flowpool.lab.pools.base import Pool, Readout, no_loss

AGGREGATIONS = ["mean", "max", "min", "std"]
SCALERS = ["identity", "amplification", "attenuation"]


class PNAPool(Pool):
    r"""Mean, maximum, minimum and deviation of each feature, as they are and times :math:`s^{\pm 1}`.

    .. math:: s = \log(N + 1) / \delta, \qquad \delta \text{ the mean of } \log(N + 1) \text{ over the training graphs}

    PyG's DegreeScalerAggregation, in which the number of nodes is in the place of the degree. `fit` finds delta.
    """

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(len(AGGREGATIONS) * len(SCALERS) * in_channels)
        self.aggregation = DegreeScalerAggregation(AGGREGATIONS, SCALERS, deg=torch.tensor([0, 1]))

    @torch.no_grad()
    def fit(self, x: Tensor, batch: Tensor) -> None:
        sizes = torch.bincount(batch).double()
        self.aggregation.avg_deg_log.fill_((sizes[sizes > 0] + 1).log().mean())

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        return Readout(self.aggregation(x, batch, dim_size=num_graphs), no_loss(x))
