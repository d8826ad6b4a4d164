"""FlowPool: the M points that are nearest to the node cloud in Sinkhorn divergence."""

from __future__ import annotations

import torch
from torch import Tensor

from flowpool import references
from flowpool.lab.options import FlowSettings
from flowpool.lab.pools.base import Cloud, PointPool, Readout, no_loss
from flowpool.lab.pools.dense import every_cluster
from flowpool.nn.pool import FlowPool as Layer


class FlowPool(PointPool):
    """The library's layer with a reference of its own, by default with its default settings."""

    has_flow_settings = True

    def __init__(self, in_channels: int, num_points: int, settings: FlowSettings | None = None) -> None:
        super().__init__(num_points * in_channels)
        self.settings = settings or FlowSettings()
        drawn = int(torch.randint(2**31 - 1, ()))  # drawn in any case, so that what follows does not depend on settings
        seed = drawn if self.settings.reference_seed is None else self.settings.reference_seed
        reference = references.normal(in_channels, num_points, seed)
        if not self.settings.relative:
            reference = reference * in_channels**0.5  # variance one in every feature, not in all together
        self.num_points = num_points
        self.layer = Layer(in_channels, num_points, reference=reference, seed=seed, **self.settings.layer_options())

    def fit(self, x: Tensor, batch: Tensor) -> None:
        if self.settings.reference == "kmeans":
            self.layer.fit_reference(x)

    def cloud(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Cloud:
        return self.flowed(x, batch, num_graphs, None)

    def weighted(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int, masses: Tensor) -> Readout:
        cloud = self.flowed(x, batch, num_graphs, masses)
        return Readout(cloud.points.flatten(1), cloud.loss)

    def flowed(self, x: Tensor, batch: Tensor, num_graphs: int, masses: Tensor | None) -> Cloud:
        """The pooled points; masses of the nodes, ``(N,)``, or None if all are equal."""
        flat = self.layer(x, batch, dim_size=num_graphs, masses=masses)  # (B, M * D)
        points = flat.view(num_graphs, self.num_points, x.shape[1])  # (B, M, D)
        return Cloud(points, every_cluster(points), no_loss(x))
