"""The torch engine: ragged graphs in, graphs of similar size solved together.

A graph is padded with nodes of mass zero to a size that depends on the graph alone, and never computed in a batch of
one (whose matrix products round differently): so its result has the same bits whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flowpool.core import flow
from flowpool.core.divergence import Energy
from flowpool.core.flow import Flowed
from flowpool.core.implicit import vector_jacobian
from flowpool.core.measures import Clouds
from flowpool.core.records import put
from flowpool.costs import Geometry

_ALONE = 4096  # graphs above this size are always computed alone; below, always in company
_BUDGET = 2**22  # entries of the (B, M, N, D) tensors of one bucket
_TIGHT = 1e-13  # marginal error of the plans behind a gradient


@dataclass(frozen=True)
class Problem:
    """Everything that defines the pooled points of a batch, in the solver's precision and frame.

    Attributes:
        clouds: the graphs.
        start: X^(0) of each, ``(B, M, D)``.
        point_masses: a, ``(M,)``.
        epsilon: ``(B,)``.
        geometry: the cost.
        debias: S_eps, or L_eps alone.
        resolution: relative precision that the nodes were given in; finer differences are rounding.
    """

    clouds: Clouds
    start: Tensor
    point_masses: Tensor
    epsilon: Tensor
    geometry: Geometry
    debias: bool
    resolution: float = torch.finfo(torch.float64).eps

    def select(self, graphs: Tensor) -> Problem:
        """The problem of some graphs, in the order given, ``(K,)`` int64."""
        return replace(self, clouds=self.clouds.select(graphs), start=self.start[graphs], epsilon=self.epsilon[graphs])


class Bucket(NamedTuple):
    """Some graphs of similar size, as one padded energy."""

    graphs: Tensor  # (K,), which graphs of the batch
    gather: Tensor  # (K, N), which node each entry is; the total number of nodes for padding
    energy: Energy
    fresh: Tensor  # (K,) bool, false for the copy that keeps a lone graph company
    keep_pairs: bool


def padded_size(size: int) -> int:
    """The number of rows that a graph of ``size`` nodes is padded to: a multiple of 32, and of about a quarter of it.

    Graphs of a few dozen nodes are so cheap that one bucket for all of them is quicker than none of them padded.
    """
    if size > _ALONE:
        return size
    unit = max(32, 1 << max(0, size.bit_length() - 3))
    return -(-size // unit) * unit


def buckets(problem: Problem) -> Iterator[Bucket]:
    """The graphs of a batch in padded groups; every tensor stays connected to the problem's."""
    clouds = problem.clouds
    sizes = clouds.sizes.tolist()
    groups: dict[int, list[int]] = {}
    for graph, size in enumerate(sizes):
        groups.setdefault(padded_size(size), []).append(graph)
    num_points, dim = problem.start.shape[1:]
    nodes = torch.cat([clouds.nodes, clouds.nodes.new_zeros(1, dim)])
    masses = torch.cat([clouds.masses, clouds.masses.new_zeros(1)])
    padding = clouds.nodes.shape[0]
    for width, members in sorted(groups.items()):
        alone = width > _ALONE
        most = 1 if alone else max(2, _BUDGET // (num_points * width * dim))
        for first in range(0, len(members), most):
            chosen = members[first : first + most]
            fresh = [True] * len(chosen)
            if len(chosen) == 1 and not alone:
                chosen, fresh = chosen * 2, [True, False]
            graphs = torch.tensor(chosen, device=nodes.device)
            column = torch.arange(width, device=nodes.device)
            start, size = clouds.ptr[graphs, None], clouds.sizes[graphs, None]
            gather = torch.where(column < size, start + column, padding)  # (K, N)
            energy = Energy(
                problem.geometry,
                nodes[gather],
                masses[gather],
                problem.point_masses.expand(len(chosen), num_points),
                problem.epsilon[graphs],
                problem.debias,
                problem.resolution,
            )
            yield Bucket(graphs, gather, energy, torch.tensor(fresh, device=nodes.device), not alone)


@torch.no_grad()
def solve(problem: Problem, tolerance: float, max_steps: int, step_size: float | None = None) -> Flowed:
    """The stationary points of all graphs, by :func:`flowpool.core.flow.follow`."""
    result = _blank(problem)
    for bucket in buckets(problem):
        start = problem.start[bucket.graphs]
        ended = flow.follow(bucket.energy, start, tolerance, max_steps, step_size, bucket.keep_pairs)
        result = put(result, bucket.graphs, ended)
    return result


class BackwardResult(NamedTuple):
    """Gradients of a loss in the tensors of a problem, with the quality of the linear solves."""

    nodes: Tensor  # (N, D)
    masses: Tensor  # (N,)
    point_masses: Tensor  # (M,)
    epsilon: Tensor  # (B,)
    parameters: dict[str, Tensor]
    residual: Tensor  # (B,)
    damped: Tensor  # (B,) bool


@torch.no_grad()
def adjoint(problem: Problem, ended: Flowed, cotangent: Tensor, ridge: float, wanted: set[str]) -> BackwardResult:
    """Gradients of ``<cotangent, X*>`` for all graphs, by :func:`flowpool.core.implicit.vector_jacobian`.

    What is not in ``wanted`` costs nothing and comes back as zeros.
    """
    clouds, tensors = problem.clouds, problem.geometry.tensors
    nodes = torch.cat([torch.zeros_like(clouds.nodes), clouds.nodes.new_zeros(1, clouds.nodes.shape[1])])
    masses = clouds.masses.new_zeros(clouds.masses.numel() + 1)
    point_masses, epsilon = torch.zeros_like(problem.point_masses), torch.zeros_like(problem.epsilon)
    parameters = {name: torch.zeros_like(tensors[name]) for name in wanted & set(tensors)}
    residual, damped = torch.zeros_like(epsilon), torch.zeros_like(epsilon, dtype=torch.bool)
    for bucket in buckets(problem):
        graphs, fresh, energy = bucket.graphs, bucket.fresh, bucket.energy
        start = (ended.points[graphs], ended.potential[graphs], ended.self_potential[graphs])
        solved = energy.evaluate_from(*start, _TIGHT)
        seed = cotangent[graphs] * fresh[:, None, None]
        found, system = vector_jacobian(energy, solved, seed, torch.full_like(energy.epsilon, ridge), wanted)
        if found.nodes is not None:
            nodes[bucket.gather[fresh]] = found.nodes[fresh]
        if found.masses is not None:
            masses[bucket.gather[fresh]] = found.masses[fresh]
        if found.point_masses is not None:
            point_masses += found.point_masses.sum(0)
        if found.epsilon is not None:
            epsilon[graphs[fresh]] = found.epsilon[fresh]
        for name, value in found.parameters.items():
            parameters[name] += value
        residual[graphs[fresh]], damped[graphs[fresh]] = system.residual[fresh], system.damped[fresh]
    return BackwardResult(nodes[:-1], masses[:-1], point_masses, epsilon, parameters, residual, damped)


def unrolled(problem: Problem, step_size: float, max_steps: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """X^(L) of all graphs by Algorithm 1 with every step recorded, and the number of steps."""
    points, steps = problem.start, torch.zeros_like(problem.epsilon, dtype=torch.long)
    for bucket in buckets(problem):
        found, taken = flow.descend(bucket.energy, problem.start[bucket.graphs], step_size, max_steps, tolerance)
        graphs = bucket.graphs[bucket.fresh]
        points = points.index_copy(0, graphs, found[bucket.fresh])
        steps = steps.index_copy(0, graphs, taken[bucket.fresh])
    return points, steps


@torch.no_grad()
def judge(problem: Problem) -> Flowed:
    """How far from stationary the points ``problem.start`` are, without moving them."""
    result = _blank(problem)
    for bucket in buckets(problem):
        here = bucket.energy.evaluate(problem.start[bucket.graphs])
        residual = flow.distance(bucket.energy, here)
        steps = torch.zeros_like(residual, dtype=torch.long)
        found = Flowed(here.points, here.xy.potential, here.self_potential, residual, steps, steps.bool())
        result = put(result, bucket.graphs, found)
    return result


def _blank(problem: Problem) -> Flowed:
    num_graphs, num_points, _ = problem.start.shape
    none = problem.start.new_zeros(num_graphs)
    potentials = problem.start.new_zeros(num_graphs, num_points)
    return Flowed(problem.start, potentials, potentials, none, none.long(), none.bool())
