"""The paper's own scheme on OTT-JAX: a plain gradient flow, its gradient by ``jax.grad`` of the Sinkhorn divergence."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowpool.core.frame import make_frame
from flowpool.core.measures import make_clouds
from flowpool.costs import Geometry, SquaredEuclidean
from flowpool.engines import torch_engine as batching
from flowpool.engines.torch_engine import Framed
from flowpool.lab.speed.cases import Case


@dataclass(frozen=True)
class OttRun:
    """Time of a batch, and how far from stationary it ended."""

    steps: int
    seconds: float
    stationary: float  # share of graphs whose Newton step is at most 1e-5 R
    median_residual: float


def time_ott(case: Case, epsilon: float, steps: int) -> OttRun:
    """The flow of all graphs at once, padded with nodes of mass zero, compiled; the best of three runs is timed.

    Raises ImportError where JAX or OTT is not installed.
    """
    import jax
    import jax.numpy as jnp
    from ott.geometry import pointcloud
    from ott.tools.sinkhorn_divergence import sinkhorn_divergence

    jax.config.update("jax_enable_x64", True)
    problem = framed(case, epsilon)
    (bucket,) = _one_bucket(problem)
    nodes, masses, start = (jnp.asarray(x.numpy()) for x in (bucket[0], bucket[1], problem.start))

    def energy(points: Any, cloud: Any, weights: Any) -> Any:
        settings = {"threshold": 1e-6, "max_iterations": 2000}
        value, _ = sinkhorn_divergence(
            pointcloud.PointCloud, points, cloud, b=weights, epsilon=epsilon, solve_kwargs=settings, static_b=True
        )
        return value

    def flow(points: Any, cloud: Any, weights: Any) -> Any:
        step = 0.25 * case.num_points / 2

        def move(_: int, here: Any) -> Any:
            return here - step * jax.grad(energy)(here, cloud, weights)

        return jax.lax.fori_loop(0, steps, move, points)

    run = jax.jit(jax.vmap(flow))
    points = run(start, nodes, masses).block_until_ready()
    best = float("inf")
    for _ in range(3 if steps <= 100 else 1):
        began = time.perf_counter()
        run(start, nodes, masses).block_until_ready()
        best = min(best, time.perf_counter() - began)
    judged = batching.judge(Framed(problem.clouds, torch.tensor(points.tolist(), dtype=torch.float64), *_rest(problem)))
    share = float((judged.residual <= 1e-5).double().mean())
    return OttRun(steps, best, share, float(judged.residual.median()))


def framed(case: Case, epsilon: float) -> Framed:
    """The case as the solver sees it."""
    reference = torch.randn(case.num_points, case.width, generator=torch.Generator().manual_seed(0)).double()
    clouds, _ = make_clouds(case.nodes.double(), case.batch, num_graphs=case.num_graphs)
    levels = torch.full((case.num_graphs,), epsilon, dtype=torch.float64)
    geometry = Geometry(SquaredEuclidean())
    frame = make_frame(clouds, geometry, levels, reference, True)
    weights = torch.full((case.num_points,), 1 / case.num_points, dtype=torch.float64)
    return Framed(frame.clouds, frame.start, weights, levels, geometry, True)


def _rest(problem: Framed) -> tuple[Tensor, Tensor, Geometry, bool]:
    return problem.point_masses, problem.epsilon, problem.geometry, problem.debias


def _one_bucket(problem: Framed) -> list[tuple[Tensor, Tensor]]:
    clouds = problem.clouds
    widest = int(clouds.sizes.max())
    nodes = clouds.nodes.new_zeros(clouds.num_graphs, widest, clouds.nodes.shape[1])
    masses = clouds.masses.new_zeros(clouds.num_graphs, widest)
    for graph in range(clouds.num_graphs):
        cloud, weights = clouds.cloud(graph)
        nodes[graph, : len(cloud)], masses[graph, : len(cloud)] = cloud, weights
    return [(nodes, masses)]
