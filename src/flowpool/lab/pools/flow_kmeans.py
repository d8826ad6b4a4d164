"""FlowPool with a reference from the training nodes."""

from __future__ import annotations

from dataclasses import replace

from flowpool.lab.options import FlowSettings
from flowpool.lab.pools.flow import FlowPool


class FlowKMeansPool(FlowPool):
    """FlowPool whose flow starts from k-means centres of the nodes that it sees before training."""

    def __init__(self, in_channels: int, num_points: int, settings: FlowSettings | None = None) -> None:
        super().__init__(in_channels, num_points, replace(settings or FlowSettings(), reference="kmeans"))
