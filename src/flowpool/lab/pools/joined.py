"""Several pools side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flowpool.lab.pools.base import Pool, Readout


class _JoinedPool(Pool):
    """The vectors of all parts, one after the other."""

    def __init__(self, parts: Sequence[Pool]) -> None:
        super().__init__(sum(part.out_channels for part in parts))
        self.parts = nn.ModuleList(parts)
        self.finished = all(part.finished for part in parts)

    def nodes_of(self, x: Tensor) -> Sequence[Tensor]:
        """What each part sees."""
        return [x] * len(self.parts)

    def fit(self, x: Tensor, batch: Tensor) -> None:
        for part, nodes in zip(self.parts, self.nodes_of(x), strict=True):
            part.fit(nodes, batch)  # type: ignore[operator]

    def readout(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Readout:
        return self._joined(x, edge_index, batch, num_graphs, None)

    def weighted(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int, masses: Tensor) -> Readout:
        return self._joined(x, edge_index, batch, num_graphs, masses)

    def _joined(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int, masses: Tensor | None) -> Readout:
        found = [
            part(nodes, edge_index, batch, num_graphs, masses)
            for part, nodes in zip(self.parts, self.nodes_of(x), strict=True)
        ]
        return Readout(
            torch.cat([readout.vector for readout in found], 1), torch.stack([readout.loss for readout in found]).sum()
        )


class PerLayerPool(_JoinedPool):
    """One pool for each layer of a backbone that hands over all its layers side by side (jumping knowledge)."""

    def nodes_of(self, x: Tensor) -> Sequence[Tensor]:
        return x.chunk(len(self.parts), 1)
