"""Times of the paper's own scheme on OTT-JAX, forward and backward (:mod:`flowpool.lab.paper.scheme`)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowpool.core.divergence import Energy
from flowpool.core.frame import make_frame
from flowpool.core.measures import make_clouds
from flowpool.costs import Geometry, SquaredEuclidean
from flowpool.engines.torch_engine import energy_of, judge
from flowpool.lab.paper.scheme import Scheme, pooled_by_ott
from flowpool.lab.speed.cases import Case
from flowpool.lab.speed.turns import in_turns, shortest, whole


@dataclass(frozen=True)
class OttRun:
    """Times of a batch in seconds, and how far from stationary it ended."""

    steps: int
    forward: float
    backward: float
    stationary: float  # share of graphs whose Newton step is at most 1e-5 R
    median_residual: float


def time_ott(case: Case, epsilon: float, steps: int) -> OttRun:
    """The flow of all graphs at once, padded with nodes of mass zero, compiled; the best of three runs is timed.

    Raises ImportError where JAX, OTT or jaxopt is not installed.
    """
    flow = pooled_by_ott(Scheme(epsilon, 0.25 * case.num_points / 2, steps, ridge=1e-12))
    import jax
    import jax.numpy as jnp

    start, energy = framed(case, epsilon)
    given = [jnp.asarray(x.numpy()) for x in (start, energy.nodes, energy.masses)]
    batched = jax.vmap(flow)
    points, forward = _timed(jax.jit(batched), given)
    _, both = _timed(jax.jit(jax.grad(lambda *x: batched(*x).sum(), argnums=1)), given)
    judged = judge(energy, torch.tensor(points.tolist(), dtype=torch.float64), 1e-5)
    share = float((judged.residual <= 1e-5).double().mean())
    return OttRun(steps, forward, max(both - forward, 0.0), share, float(judged.residual.median()))


def _timed(function: Any, given: Any) -> tuple[Any, float]:
    """What a compiled function returns, and its best time after the first."""
    result = function(*given).block_until_ready()
    taken = in_turns({"": whole(lambda: function(*given).block_until_ready(), time.perf_counter)}, 3, warm=False)
    return result, shortest(taken[""])[0]


def framed(case: Case, epsilon: float) -> tuple[Tensor, Energy]:
    """X^(0) and the clouds of a case as the solver sees them, padded to the size of the largest."""
    reference = torch.randn(case.num_points, case.width, generator=torch.Generator().manual_seed(0)).double()
    clouds, _ = make_clouds(case.nodes.double(), case.batch, num_graphs=case.num_graphs)
    levels = torch.full((case.num_graphs,), epsilon, dtype=torch.float64)
    frame = make_frame(clouds, Geometry(SquaredEuclidean()), levels, reference, True)
    weights = torch.full((case.num_points,), 1 / case.num_points, dtype=torch.float64)
    return frame.start, energy_of(frame, torch.arange(case.num_graphs), weights, True)
