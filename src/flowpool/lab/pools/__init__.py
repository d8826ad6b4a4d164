"""Every pooling method that the bench compares, behind one interface.

``POOLS[name](in_channels, num_points, seed=0)`` builds a `Pool`. A further method is one more file here and one more
entry in :data:`flowpool.lab.names.POOLS`. Its file is imported when it is first built: some need slow packages.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

import torch

from flowpool.lab import names
from flowpool.lab.options import FlowSettings
from flowpool.lab.pools.base import Cloud, PointPool, Pool, Readout

__all__ = ["POOLS", "Builder", "Cloud", "FlowSettings", "PointPool", "Pool", "Readout", "pool_class"]


class Builder(Protocol):
    """Makes a pool; the same seed makes the same pool. ``flow`` is for pools that run the whole flow."""

    def __call__(
        self, in_channels: int, num_points: int, *, seed: int = 0, flow: FlowSettings | None = None
    ) -> Pool: ...


def pool_class(name: str) -> Any:
    """The class of the pool of that name."""
    module, _, kind = names.POOLS[name].partition(".")
    return getattr(import_module(f"flowpool.lab.pools.{module}"), kind)


def _seeded(name: str) -> Builder:
    """A builder that draws initial parameters from its own seed and leaves torch's random state as it was."""

    def build(in_channels: int, num_points: int, *, seed: int = 0, flow: FlowSettings | None = None) -> Pool:
        construct = pool_class(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            settings = (flow,) if construct.has_flow_settings else ()
            pool: Pool = construct(in_channels, num_points, *settings)
            return pool

    return build


POOLS: dict[str, Builder] = {name: _seeded(name) for name in names.POOLS}
