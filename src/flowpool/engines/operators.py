"""The compiled engine as functional custom operators, so that ``torch.compile`` and ``torch.export`` see through it.

In eager mode the engine is called directly and reports on the backward pass; while a graph is being traced these operators
are called instead. They compute the same. Nobody else knows ``torch.ops``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from flowpool.core.measures import graphs_of
from flowpool.costs import Geometry, Mahalanobis, SquaredEuclidean
from flowpool.engines import compiled
from flowpool.engines.seam import Problem, Solution
from flowpool.options import Options


class _Given(NamedTuple):
    """A problem of the compiled engine as arguments of an operator."""

    nodes: Tensor
    masses: Tensor | None
    batch: Tensor
    ptr: Tensor
    reference: Tensor
    point_masses: Tensor
    epsilon: Tensor
    weight: Tensor | None  # of a diagonal Mahalanobis cost
    relative: bool
    resolution: float
    tolerance: float
    max_steps: int
    ridge: float | None

    def problem(self) -> Problem:
        geometry = Geometry(SquaredEuclidean())
        if self.weight is not None:
            geometry = Geometry(Mahalanobis(self.weight.shape[0]), {"weight": self.weight})
        options = Options(tolerance=self.tolerance, max_steps=self.max_steps, ridge=self.ridge)
        return Problem(*self[:7], self.relative, geometry, self.resolution, options)


@torch.library.custom_op("flowpool::graphs", mutates_args=())
def graphs(
    nodes: Tensor, index: Tensor | None, ptr: Tensor | None, masses: Tensor | None, num_graphs: int
) -> tuple[Tensor, Tensor]:
    """:func:`flowpool.core.measures.graphs_of`, which looks at values."""
    offsets, graph = graphs_of(nodes, index, ptr, masses, num_graphs)
    return offsets.clone(), graph.clone()


@graphs.register_fake
def _(
    nodes: Tensor, index: Tensor | None, ptr: Tensor | None, masses: Tensor | None, num_graphs: int
) -> tuple[Tensor, Tensor]:
    return nodes.new_empty(num_graphs + 1, dtype=torch.long), nodes.new_empty(nodes.shape[0], dtype=torch.long)


@torch.library.custom_op("flowpool::solve", mutates_args=())
def solve(
    nodes: Tensor,
    masses: Tensor | None,
    batch: Tensor,
    ptr: Tensor,
    reference: Tensor,
    point_masses: Tensor,
    epsilon: Tensor,
    weight: Tensor | None,
    relative: bool,
    resolution: float,
    tolerance: float,
    max_steps: int,
    ridge: float | None,
) -> list[Tensor]:
    """The fields of :class:`flowpool.engines.seam.Solution`; ``ridge`` is for the backward pass."""
    given = _Given(
        nodes,
        masses,
        batch,
        ptr,
        reference,
        point_masses,
        epsilon,
        weight,
        relative,
        resolution,
        tolerance,
        max_steps,
        ridge,
    )
    return list(compiled.solve(given.problem()))


@solve.register_fake
def _(nodes: Tensor, *given: Any) -> list[Tensor]:
    reference, epsilon = given[3], given[5]
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
        epsilon.new_empty(nodes.shape[0], dtype=torch.long),
        nodes.new_empty(nodes.shape),
        epsilon.new_empty(nodes.shape[0]),
        epsilon.new_empty(graphs, 3 * features + 3),
    ]


@torch.library.custom_op("flowpool::adjoint", mutates_args=())
def adjoint(
    nodes: Tensor,
    masses: Tensor | None,
    batch: Tensor,
    ptr: Tensor,
    reference: Tensor,
    point_masses: Tensor,
    epsilon: Tensor,
    weight: Tensor | None,
    relative: bool,
    resolution: float,
    ridge: float | None,
    behind: list[Tensor],
    cotangent: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``<cotangent, points>`` in nodes, masses, epsilon and weight; empty for what was not given.

    ``behind`` is what :func:`solve` returned after the first five.
    """
    given = _Given(
        nodes, masses, batch, ptr, reference, point_masses, epsilon, weight, relative, resolution, 1.0, 1, ridge
    )
    solution = Solution(*[torch.empty(0)] * 5, *behind)
    found = compiled.adjoint(
        given.problem(), solution, cotangent, {"nodes", "masses", "epsilon", "cost.weight"}
    ).by_name
    # Each its own tensor: no two returns of an operator may be the same.
    to_masses, to_weight = (found.get(name, epsilon.new_empty(0)) for name in ("masses", "cost.weight"))
    return found["nodes"], to_masses, found["epsilon"], to_weight


@adjoint.register_fake
def _(nodes: Tensor, masses: Tensor | None, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    epsilon, weight = given[4], given[5]
    return (
        nodes.new_empty(nodes.shape),
        epsilon.new_empty(0) if masses is None else masses.new_empty(masses.shape),
        epsilon.new_empty(epsilon.shape),
        epsilon.new_empty(0) if weight is None else weight.new_empty(weight.shape),
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, ctx.relative, ctx.resolution, _, _, ctx.ridge = inputs
    ctx.save_for_backward(*tensors, *output[5:])


def _differentiate(ctx: Any, cotangents: list[Tensor]) -> tuple[Tensor | None, ...]:
    given, behind = ctx.saved_tensors[:8], list(ctx.saved_tensors[8:])
    nodes, masses, epsilon, weight = torch.ops.flowpool.adjoint(
        *given, ctx.relative, ctx.resolution, ctx.ridge, behind, cotangents[0]
    )
    to_masses = None if given[1] is None else masses
    to_weight = None if given[7] is None else weight
    return (nodes, to_masses, None, None, None, None, epsilon, to_weight, *[None] * 5)


def _refuse(ctx: Any, *_: Any) -> NoReturn:
    raise RuntimeError("flow_pool cannot be differentiated twice; call backward or grad without create_graph.")


solve.register_autograd(_differentiate, setup_context=_remember)
adjoint.register_autograd(_refuse)


def traced_graphs(
    nodes: Tensor, index: Tensor | None, ptr: Tensor | None, masses: Tensor | None, num_graphs: int
) -> tuple[Tensor, Tensor]:
    """:func:`flowpool.core.measures.graphs_of` in a graph that is being traced."""
    found: tuple[Tensor, Tensor] = torch.ops.flowpool.graphs(nodes.detach(), index, ptr, masses, num_graphs)
    return found


def traced_solve(problem: Problem) -> Solution:
    """The compiled engine in a graph that is being traced; only the points have a derivative, as in eager mode."""
    options = problem.options
    found = torch.ops.flowpool.solve(
        problem.nodes,
        problem.masses,
        problem.batch,
        problem.ptr,
        problem.reference,
        problem.point_masses,
        problem.epsilon,
        problem.geometry.tensors.get("weight"),
        problem.relative,
        problem.resolution,
        options.tolerance,
        options.max_steps,
        options.ridge,
    )
    return Solution(found[0], *(value.detach() for value in found[1:]))
