"""Equilibrium aggregation (Bartunov et al., 2022): the minimiser of a learned energy."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.nn.aggr import EquilibriumAggregation

from flowpool.lab.pools.base import Pool, Readout, no_loss

HIDDEN = 32


class EquilibriumPool(Pool):
    r"""PyG's EquilibriumAggregation, five steps with momentum towards the minimum of an energy for each graph.

    .. math:: y = \arg\min_y \; \mathrm{softplus}(\lambda) |y|^2 + \tfrac1N \sum_j F(x_j, y)

    PyG divides the first term by the number of graphs, so that a graph would depend on its company in the batch; that is
    not in the paper and is undone here.
    """

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(in_channels)
        self.aggregation = _PerGraph(in_channels, in_channels, [HIDDEN])

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        training = torch.is_grad_enabled()
        found = self.aggregation(x, batch, dim_size=num_graphs)  # its steps need a gradient in any case
        return Readout(found if training else found.detach(), no_loss(x))


class _PerGraph(EquilibriumAggregation):
    def init_output(self, dim_size: int) -> Tensor:
        return torch.zeros(dim_size, self.output_dim).to(self.lamb).requires_grad_()

    def reg(self, y: Tensor) -> Tensor:
        penalty: Tensor = self.softplus(self.lamb) * y.square().sum()
        return penalty
