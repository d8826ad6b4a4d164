"""FlowPool with a reference from the training nodes."""

from __future__ import annotations

from torch import Tensor

from flowpool.lab.pools.flow import FlowPool


class FlowKMeansPool(FlowPool):
    """FlowPool whose flow starts from k-means centres of the nodes that it sees before training."""

    def fit(self, x: Tensor, batch: Tensor) -> None:
        self.layer.fit_reference(x)
