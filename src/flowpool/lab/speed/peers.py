"""Pooling methods to be timed: each maps nodes and batch of a case to its pooled output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch_geometric.nn import aggr

from flowpool import flow_pool
from flowpool.lab.pools import POOLS
from flowpool.lab.speed.cases import Case

Peer = Callable[[Tensor], Tensor]
BASE = "GraphMultisetTransformer"  # every time is also given as a ratio to this one


def flow_peer(case: Case, engine: Literal["compiled", "torch"], epsilon: float) -> Peer:
    reference = torch.randn(case.num_points, case.width, generator=torch.Generator().manual_seed(0))

    def pool(nodes: Tensor) -> Tensor:
        pooled = flow_pool(
            nodes, case.batch, reference=reference, engine=engine, epsilon=epsilon, dim_size=case.num_graphs
        )
        return pooled.points

    return pool


def pooling_layers(width: int, num_points: int) -> dict[str, nn.Module]:
    """Aggregations of PyG: a sum, two transformers, and one that optimises, too."""
    return {
        BASE: aggr.GraphMultisetTransformer(width, k=num_points, heads=1),
        "SetTransformerAggregation": aggr.SetTransformerAggregation(width, num_points, heads=1),
        "EquilibriumAggregation": aggr.EquilibriumAggregation(width, width, num_layers=[width]),
        "SumAggregation": aggr.SumAggregation(),
    }


def layer_peers(case: Case) -> dict[str, Peer]:
    """Sorting, the learned aggregations of PyG, and POT's template pooling, by the names they have there."""
    torch.manual_seed(0)
    layers = {"SortAggregation": aggr.SortAggregation(case.num_points), **pooling_layers(case.width, case.num_points)}
    peers: dict[str, Peer] = {name: _aggregate(layer, case) for name, layer in layers.items()}
    if len(case.nodes) <= 2000:
        template = POOLS["tw"](case.width, case.num_points)
        edges = torch.zeros(2, 0, dtype=torch.long)
        peers["TWPooling (POT)"] = lambda nodes: template(nodes, edges, case.batch, case.num_graphs).vector
    return peers


def _aggregate(layer: nn.Module, case: Case) -> Peer:
    def pool(nodes: Tensor) -> Tensor:
        result: Tensor = layer(nodes, case.batch, dim_size=case.num_graphs)
        return result

    return pool
