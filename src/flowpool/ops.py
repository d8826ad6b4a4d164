"""The compiled engine as functional custom operators, so that ``torch.compile`` and ``torch.export`` see through it.

In eager mode :func:`flowpool.flow_pool` calls the engine directly and reports on the backward pass; while a graph is
being traced it calls these operators instead. They compute the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowpool.batching import Problem
from flowpool.costs import Geometry, SquaredEuclidean
from flowpool.engines import CompiledEngine
from flowpool.flow import Flowed
from flowpool.measures import Clouds, arrange_nodes


@torch.library.custom_op("flowpool::arrange", mutates_args=())
def arrange(
    nodes: Tensor, index: Tensor | None, ptr: Tensor | None, masses: Tensor | None, num_graphs: int
) -> tuple[Tensor, Tensor]:
    """Offsets ``(B + 1,)`` of the graphs and the order ``(N,)`` that sorts the nodes; checks all values."""
    offsets, order = arrange_nodes(nodes, index, ptr, masses, num_graphs)
    return offsets.clone(), order


@arrange.register_fake
def _(
    nodes: Tensor, index: Tensor | None, ptr: Tensor | None, masses: Tensor | None, num_graphs: int
) -> tuple[Tensor, Tensor]:
    return nodes.new_empty(num_graphs + 1, dtype=torch.long), nodes.new_empty(nodes.shape[0], dtype=torch.long)


def _problem(
    nodes: Tensor,
    masses: Tensor,
    ptr: Tensor,
    start: Tensor,
    point_masses: Tensor,
    epsilon: Tensor,
    resolution: float,
) -> Problem:
    clouds = Clouds.from_ptr(nodes, masses, ptr)
    return Problem(clouds, start, point_masses, epsilon, Geometry(SquaredEuclidean()), True, resolution)


@torch.library.custom_op("flowpool::solve", mutates_args=(), device_types="cpu")
def solve(
    nodes: Tensor,
    masses: Tensor,
    ptr: Tensor,
    solvable: Tensor,
    start: Tensor,
    point_masses: Tensor,
    epsilon: Tensor,
    resolution: float,
    tolerance: float,
    max_steps: int,
    ridge: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:class:`flowpool.flow.Flowed` of a batch; ``ridge`` is for the backward pass."""
    problem = _problem(nodes, masses, ptr, start, point_masses, epsilon, resolution)
    ended = CompiledEngine().solve(problem, solvable, tolerance, max_steps, None)
    return ended.points, ended.potential, ended.self_potential, ended.residual, ended.steps, ended.singular


@solve.register_fake
def _(
    nodes: Tensor,
    masses: Tensor,
    ptr: Tensor,
    solvable: Tensor,
    start: Tensor,
    point_masses: Tensor,
    epsilon: Tensor,
    resolution: float,
    tolerance: float,
    max_steps: int,
    ridge: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_graphs, num_points, _ = start.shape
    return (
        start.new_empty(start.shape),
        start.new_empty(num_graphs, num_points),
        start.new_empty(num_graphs, num_points),
        start.new_empty(num_graphs),
        start.new_empty(num_graphs, dtype=torch.long),
        start.new_empty(num_graphs, dtype=torch.bool),
    )


@torch.library.custom_op("flowpool::adjoint", mutates_args=(), device_types="cpu")
def adjoint(
    nodes: Tensor,
    masses: Tensor,
    ptr: Tensor,
    solvable: Tensor,
    points: Tensor,
    potential: Tensor,
    self_potential: Tensor,
    point_masses: Tensor,
    epsilon: Tensor,
    cotangent: Tensor,
    resolution: float,
    ridge: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``<cotangent, points>`` in nodes, masses and epsilon."""
    problem = _problem(nodes, masses, ptr, points, point_masses, epsilon, resolution)
    blank = torch.zeros_like(epsilon)
    ended = Flowed(points, potential, self_potential, blank, blank.long(), blank.bool())
    found = CompiledEngine().adjoint(problem, solvable, ended, cotangent, ridge, {"nodes", "masses", "epsilon"})
    return found.nodes, found.masses, found.epsilon


@adjoint.register_fake
def _(
    nodes: Tensor,
    masses: Tensor,
    ptr: Tensor,
    solvable: Tensor,
    points: Tensor,
    potential: Tensor,
    self_potential: Tensor,
    point_masses: Tensor,
    epsilon: Tensor,
    cotangent: Tensor,
    resolution: float,
    ridge: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return nodes.new_empty(nodes.shape), masses.new_empty(masses.shape), epsilon.new_empty(epsilon.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    nodes, masses, ptr, solvable, _, point_masses, epsilon, ctx.resolution, _, _, ctx.ridge = inputs
    ctx.save_for_backward(nodes, masses, ptr, solvable, *output[:3], point_masses, epsilon)


def _differentiate(ctx: Any, cotangent: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    nodes, masses, epsilon = torch.ops.flowpool.adjoint(*ctx.saved_tensors, cotangent, ctx.resolution, ctx.ridge)
    return nodes, masses, None, None, None, None, epsilon, None, None, None, None


solve.register_autograd(_differentiate, setup_context=_remember)
