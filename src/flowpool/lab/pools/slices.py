"""Pooling by sliced-Wasserstein embedding (Naderializadeh et al., 2021)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch_geometric.nn import MLP
from torch_geometric.utils import to_dense_batch

from flowpool.lab.pools.base import Pool, Readout, graph_sizes, no_loss


class SlicesPool(Pool):
    """Displacements, slice by slice, of M learned reference points to the quantiles of the nodes.

    As many slices as features, so that the vector has the size M * D of the other methods.
    """

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(num_points * in_channels)
        self.directions = nn.Parameter(torch.randn(in_channels, in_channels))  # one slice per column
        self.reference = nn.Parameter(torch.randn(num_points, in_channels))  # (M, D)

    def slices(self) -> Tensor:
        """Unit directions, one per column, ``(D, L)``."""
        return nn.functional.normalize(self.directions, dim=0)

    def sliced(self, rows: Tensor) -> Tensor:
        """Nodes or reference points ``(N, D)`` on every slice, ``(N, L)``."""
        return rows @ self.slices()

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        projected, _ = to_dense_batch(self.sliced(x), batch, batch_size=num_graphs, fill_value=math.inf)  # (B, N, L)
        values = quantiles(projected, graph_sizes(batch, num_graphs), len(self.reference))  # (B, M, L)
        reference = self.sliced(self.reference)  # (M, L)
        # The optimal map on a line sends the reference point of rank r to the r-th quantile.
        ranks = reference.argsort(dim=0).argsort(dim=0)  # (M, L)
        targets = values.gather(1, ranks.expand(num_graphs, -1, -1))  # (B, M, L)
        return Readout((targets - reference).flatten(1), no_loss(x))


class GeneralisedSlicesPool(SlicesPool):
    r"""The same along curved slices, :math:`g_l(y) = \langle \theta_l, h(y) \rangle` with an MLP h (Kolouri et al., 2019).

    A plain projection is a plane wave; these slices are what the paper calls generalised ones.
    """

    def __init__(self, in_channels: int, num_points: int) -> None:
        super().__init__(in_channels, num_points)
        self.network = MLP([in_channels, in_channels, in_channels], norm=None, act="tanh")

    def sliced(self, rows: Tensor) -> Tensor:
        return super().sliced(self.network(rows))


def quantiles(values: Tensor, sizes: Tensor, num_quantiles: int) -> Tensor:
    """Evenly spaced quantiles of each column of each graph, interpolated linearly between the sorted values.

    The i-th of n sorted values lies at (i + 1/2) / n, so n quantiles of n values are the values themselves.

    Args:
        values: ``(B, N, L)``, padded with infinity.
        sizes: number of values before the padding, ``(B,)``.
        num_quantiles: M.

    Returns:
        ``(B, M, L)``, rising along the second axis.
    """
    ordered = values.sort(dim=1).values  # (B, N, L)
    levels = (torch.arange(num_quantiles, device=values.device, dtype=values.dtype) + 0.5) / num_quantiles  # (M,)
    last = sizes.unsqueeze(1) - 1  # (B, 1)
    position = (levels * sizes.unsqueeze(1) - 0.5).clamp(min=0)  # (B, M)
    position = torch.minimum(position, last.to(values.dtype))
    lower = position.floor().long()  # (B, M)
    upper = torch.minimum(lower + 1, last)
    share = (position - lower).unsqueeze(2)  # (B, M, 1)
    columns = values.shape[2]
    below = ordered.gather(1, lower.unsqueeze(2).expand(-1, -1, columns))  # (B, M, L)
    above = ordered.gather(1, upper.unsqueeze(2).expand(-1, -1, columns))
    return below + share * (above - below)
