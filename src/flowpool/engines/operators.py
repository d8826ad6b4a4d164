"""The compiled engine as functional custom operators, so that ``torch.compile`` and ``torch.export`` see through it.

In eager mode :func:`flowpool.flow_pool` calls the engine directly and reports on the backward pass; while a graph is
being traced it calls these operators instead. They compute the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowpool.core.measures import arrange_nodes
from flowpool.engines import compiled as kernels
from flowpool.engines.compiled import Ended, Given


@torch.library.custom_op("flowpool::arrange", mutates_args=())
def arrange(
    nodes: Tensor, index: Tensor | None, ptr: Tensor | None, masses: Tensor | None, num_graphs: int, compiled: bool
) -> tuple[Tensor, Tensor]:
    """Offsets ``(B + 1,)`` of the graphs and the order ``(N,)`` that sorts the nodes; checks all values."""
    offsets, order = arrange_nodes(nodes, index, ptr, masses, num_graphs, compiled)
    return offsets.clone(), order


@arrange.register_fake
def _(
    nodes: Tensor, index: Tensor | None, ptr: Tensor | None, masses: Tensor | None, num_graphs: int, compiled: bool
) -> tuple[Tensor, Tensor]:
    return nodes.new_empty(num_graphs + 1, dtype=torch.long), nodes.new_empty(nodes.shape[0], dtype=torch.long)


@torch.library.custom_op("flowpool::solve", mutates_args=(), device_types="cpu")
def solve(
    nodes: Tensor,
    masses: Tensor | None,
    order: Tensor,
    ptr: Tensor,
    epsilon: Tensor,
    weights: Tensor | None,
    point_masses: Tensor,
    relative: bool,
    resolution: float,
    reference: Tensor,
    tolerance: float,
    max_steps: int,
    ridge: float,
) -> list[Tensor]:
    """:class:`flowpool.engines.compiled.Ended` of a batch; ``ridge`` is for the backward pass."""
    given = Given(masses, order, ptr, epsilon, weights, point_masses, relative, resolution)
    return list(kernels.solve(nodes, given, reference, tolerance, max_steps))


@solve.register_fake
def _(
    nodes: Tensor,
    masses: Tensor | None,
    order: Tensor,
    ptr: Tensor,
    epsilon: Tensor,
    weights: Tensor | None,
    point_masses: Tensor,
    relative: bool,
    resolution: float,
    reference: Tensor,
    tolerance: float,
    max_steps: int,
    ridge: float,
) -> list[Tensor]:
    graphs, (count, features) = epsilon.shape[0], reference.shape
    return [
        nodes.new_empty(graphs, count, features),
        epsilon.new_empty(graphs),
        epsilon.new_empty(graphs, dtype=torch.long),
        epsilon.new_empty(graphs, dtype=torch.int8),
        epsilon.new_empty(graphs, dtype=torch.bool),
        epsilon.new_empty(graphs, count, features),
        epsilon.new_empty(graphs, count),
        epsilon.new_empty(graphs, count),
        nodes.new_empty(nodes.shape),
        epsilon.new_empty(nodes.shape[0]),
        epsilon.new_empty(graphs, 3 * features + 3),
    ]


@torch.library.custom_op("flowpool::adjoint", mutates_args=(), device_types="cpu")
def adjoint(
    behind: list[Tensor],
    masses: Tensor | None,
    order: Tensor,
    ptr: Tensor,
    epsilon: Tensor,
    weights: Tensor | None,
    point_masses: Tensor,
    relative: bool,
    resolution: float,
    cotangent: Tensor,
    ridge: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``<cotangent, points>`` in nodes, masses, epsilon and weights; empty for what was not given.

    ``behind`` is what :func:`solve` returned after the first five.
    """
    given = Given(masses, order, ptr, epsilon, weights, point_masses, relative, resolution)
    ended = Ended(*[torch.empty(0)] * 5, *behind)
    found = kernels.adjoint(ended, given, cotangent, ridge, {"nodes", "masses", "epsilon", "weights"})
    to_masses = epsilon.new_empty(0) if found.masses is None else found.masses
    to_weights = epsilon.new_empty(0) if found.weights is None else found.weights
    return found.nodes, to_masses, found.epsilon, to_weights


@adjoint.register_fake
def _(
    behind: list[Tensor],
    masses: Tensor | None,
    order: Tensor,
    ptr: Tensor,
    epsilon: Tensor,
    weights: Tensor | None,
    point_masses: Tensor,
    relative: bool,
    resolution: float,
    cotangent: Tensor,
    ridge: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    nodes = behind[3]
    return (
        nodes.new_empty(nodes.shape),
        epsilon.new_empty(0) if masses is None else masses.new_empty(masses.shape),
        epsilon.new_empty(epsilon.shape),
        epsilon.new_empty(0) if weights is None else weights.new_empty(weights.shape),
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, *given, ctx.relative, ctx.resolution, _, _, _, ctx.ridge = inputs
    ctx.save_for_backward(*given, *output[5:])


def _differentiate(ctx: Any, cotangents: list[Tensor]) -> tuple[Tensor | None, ...]:
    given, behind = ctx.saved_tensors[:6], list(ctx.saved_tensors[6:])
    nodes, masses, epsilon, weights = torch.ops.flowpool.adjoint(
        behind, *given, ctx.relative, ctx.resolution, cotangents[0], ctx.ridge
    )
    has_masses, has_weights = given[0] is not None, given[4] is not None
    return (
        nodes, masses if has_masses else None, None, None, epsilon, weights if has_weights else None,
        None, None, None, None, None, None, None,
    )  # fmt: skip


solve.register_autograd(_differentiate, setup_context=_remember)
