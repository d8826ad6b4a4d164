"""The layers under a name of their own in PyTorch Geometric and in its GraphGym."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import cache

import torch_geometric.nn.aggr
from torch import Tensor

from flowpool.nn.pool import FlowPool
from flowpool.nn.readout import FlowReadout


def register_with_pyg(num_points: int = 8) -> None:
    """Lets PyG find the layers by name: ``aggr="flowpool"`` or ``"flowreadout"`` with ``aggr_kwargs``.

    GraphGym gets ``graph_pooling: flowpool``. FlowReadout has parameters, which GraphGym's pools, plain functions, have no
    place for.

    Args:
        num_points: M of ``graph_pooling: flowpool``. Its output has M times the width of the nodes, so that it needs a
            head of that width.
    """
    torch_geometric.nn.aggr.FlowPool, torch_geometric.nn.aggr.FlowReadout = FlowPool, FlowReadout

    @cache
    def layer(in_channels: int) -> FlowPool:
        return FlowPool(in_channels, num_points)

    def pool(x: Tensor, batch: Tensor, size: int | None = None) -> Tensor:
        result: Tensor = layer(x.shape[-1]).to(x.device)(x, batch, dim_size=size)
        return result

    with suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GraphGym complains at import about its own missing extras
        from torch_geometric.graphgym.register import pooling_dict

        pooling_dict["flowpool"] = pool
