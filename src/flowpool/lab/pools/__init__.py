"""Every pooling method that the bench compares, behind one interface.

``POOLS[name](in_channels, num_points, seed=0)`` builds a `Pool`. A further method is one more entry:
``"name": seeded(ItsClass)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch_geometric.nn.aggr import MaxAggregation, MeanAggregation, SumAggregation

from flowpool.lab.pools.base import Cloud, PointPool, Pool, Readout
from flowpool.lab.pools.diff import DiffPool
from flowpool.lab.pools.flow import FlowPool
from flowpool.lab.pools.flow_attention import FlowAttentionPool
from flowpool.lab.pools.flow_deviations import FlowDeviationsPool
from flowpool.lab.pools.flow_free import FlowFreePool
from flowpool.lab.pools.flow_hierarchy import FlowHierarchyPool
from flowpool.lab.pools.flow_kmeans import FlowKMeansPool
from flowpool.lab.pools.flow_mahalanobis import FlowMahalanobisPool
from flowpool.lab.pools.flow_step import FlowStepPool
from flowpool.lab.pools.gmt import GMTPool
from flowpool.lab.pools.haar import HaarPool
from flowpool.lab.pools.mincut import MinCutPool
from flowpool.lab.pools.otke import OTKEPool
from flowpool.lab.pools.pswe import PSWEPool
from flowpool.lab.pools.reduce import ReducePool
from flowpool.lab.pools.sag import SAGPool
from flowpool.lab.pools.set_transformer import SetTransformerPool
from flowpool.lab.pools.sinkformer import SinkformerPool
from flowpool.lab.pools.sort import SortPool
from flowpool.lab.pools.struct import StructPool
from flowpool.lab.pools.tfgw import TFGWPool
from flowpool.lab.pools.topk import TopKPool
from flowpool.lab.pools.tw import TWPool
from flowpool.lab.pools.wegl import WEGLPool

__all__ = ["POOLS", "Builder", "Cloud", "PointPool", "Pool", "Readout", "seeded"]


class Builder(Protocol):
    """Makes a pool; the same seed makes the same pool."""

    def __call__(self, in_channels: int, num_points: int, *, seed: int = 0) -> Pool: ...


def seeded(construct: Callable[[int, int], Pool]) -> Builder:
    """A builder that draws initial parameters from its own seed and leaves torch's random state as it was."""

    def build(in_channels: int, num_points: int, *, seed: int = 0) -> Pool:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return construct(in_channels, num_points)

    return build


POOLS: dict[str, Builder] = {
    "flow": seeded(FlowPool),
    "flow-attention": seeded(FlowAttentionPool),
    "flow-deviations": seeded(FlowDeviationsPool),
    "flow-free": seeded(FlowFreePool),
    "flow-kmeans": seeded(FlowKMeansPool),
    "flow-mahalanobis": seeded(FlowMahalanobisPool),
    "flow-step": seeded(FlowStepPool),
    "flow2": seeded(FlowHierarchyPool),
    "mean": seeded(lambda in_channels, _: ReducePool(in_channels, MeanAggregation())),
    "sum": seeded(lambda in_channels, _: ReducePool(in_channels, SumAggregation())),
    "max": seeded(lambda in_channels, _: ReducePool(in_channels, MaxAggregation())),
    "sort": seeded(SortPool),
    "topk": seeded(TopKPool),
    "sag": seeded(SAGPool),
    "diff": seeded(DiffPool),
    "mincut": seeded(MinCutPool),
    "struct": seeded(StructPool),
    "haar": seeded(HaarPool),
    "gmt": seeded(GMTPool),
    "set-transformer": seeded(SetTransformerPool),
    "sinkformer": seeded(SinkformerPool),
    "otke": seeded(OTKEPool),
    "pswe": seeded(PSWEPool),
    "wegl": seeded(WEGLPool),
    "tw": seeded(TWPool),
    "tfgw": seeded(TFGWPool),
}
