"""The kernels compiled ahead of time, so that the first call of a program does not wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from flowpool import costs, flow_pool, transport_pool


def compile_kernels() -> Iterator[str]:
    """Runs every kind of call once, forward and backward; yields what it is about to do.

    Raises ValueError, with the reason, where the compiled engine does not work.
    """
    for name, call in _calls():
        yield name
        call()


def num_calls() -> int:
    return sum(1 for _ in _calls())


def _calls() -> Iterator[tuple[str, Callable[[], None]]]:
    for dtype in (torch.float32, torch.float64):
        kind = str(dtype).removeprefix("torch.")
        yield f"flow_pool, {kind}", partial(_flow, dtype, False)
        yield f"flow_pool with masses and feature weights, {kind}", partial(_flow, dtype, True)
        yield f"transport_pool, {kind}", partial(_transport, dtype, False)
        yield f"transport_pool with free masses, {kind}", partial(_transport, dtype, True)


def _flow(dtype: torch.dtype, weighted: bool) -> None:
    nodes, batch, points = _sample(dtype)
    masses = torch.ones(len(nodes), dtype=dtype, requires_grad=True) if weighted else None
    cost = costs.Mahalanobis(nodes.shape[1]).to(dtype) if weighted else "sqeuclidean"
    pooled = flow_pool(nodes, batch, reference=points, masses=masses, cost=cost, engine="compiled")
    pooled.points.square().sum().backward()


def _transport(dtype: torch.dtype, free: bool) -> None:
    nodes, batch, points = _sample(dtype)
    received = transport_pool(nodes, batch, reference=points.requires_grad_(), epsilon=0.5, free=free)
    (received.points.square().sum() + received.variances.sum() + received.masses.square().sum()).backward()


def _sample(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two graphs of ten nodes, and a reference."""
    generator = torch.Generator().manual_seed(0)
    nodes = torch.randn(20, 3, generator=generator, dtype=dtype).requires_grad_()
    points = torch.randn(2, 3, generator=generator, dtype=dtype)
    return nodes, torch.arange(2).repeat_interleave(10), points
