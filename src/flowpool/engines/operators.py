"""The compiled engine as functional custom operators, so that ``torch.compile`` and ``torch.export`` see through it.

In eager mode the engine is called directly and reports on the backward pass; while a graph is being traced these operators
are called instead. They compute the same. Nobody else knows ``torch.ops``.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from flowpool.core.measures import graphs_of
from flowpool.costs import Geometry, Mahalanobis, SquaredEuclidean
from flowpool.engines import compiled
from flowpool.engines.devices import UNRECORDED
from flowpool.engines.interface import Problem, Solution
from flowpool.options import Options

# A problem of the compiled engine as arguments of an operator: eight tensors, the last of them the parameter of a diagonal
# Mahalanobis cost, and five numbers.
_GIVEN = (
    "Tensor nodes, Tensor? masses, Tensor batch, Tensor ptr, Tensor reference, Tensor point_masses, Tensor epsilon, "
    "Tensor? weight, bool relative, float resolution, float tolerance, int max_steps, float? ridge"
)


def _given(problem: Problem) -> tuple[Any, ...]:
    options = problem.options
    return (
        problem.nodes, problem.masses, problem.batch, problem.ptr, problem.reference, problem.point_masses,
        problem.epsilon, problem.geometry.tensors.get("weight"), problem.relative, problem.resolution, options.tolerance,
        options.max_steps, options.ridge,
    )  # fmt: skip


def _problem(*given: Any) -> Problem:
    nodes, masses, batch, ptr, reference, shares, epsilon, weight, relative, resolution, tolerance, max_steps, ridge = (
        given
    )
    geometry = Geometry(SquaredEuclidean())
    if weight is not None:
        geometry = Geometry(Mahalanobis(weight.shape[0]), {"weight": weight})
    options = Options(tolerance=tolerance, max_steps=max_steps, ridge=ridge)
    return Problem(nodes, masses, batch, ptr, reference, shares, epsilon, relative, geometry, resolution, options)


@torch.library.custom_op("flowpool::graphs", mutates_args=(), tags=UNRECORDED)
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


@torch.library.custom_op("flowpool::solve", mutates_args=(), tags=UNRECORDED, schema=f"({_GIVEN}) -> Tensor[]")
def solve(*given: Any) -> list[Tensor]:
    """The tensors of a :class:`flowpool.engines.interface.Solution`; ``ridge`` is for the backward pass."""
    return list(compiled.solve(_problem(*given)).tensors())


@solve.register_fake
def _(*given: Any) -> list[Tensor]:
    return list(compiled.blank(_problem(*given)).tensors())


@torch.library.custom_op(
    "flowpool::adjoint",
    mutates_args=(),
    tags=UNRECORDED,
    schema=f"({_GIVEN}, Tensor[] solution, Tensor cotangent) -> (Tensor, Tensor, Tensor, Tensor)",
)
def adjoint(*arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of ``<cotangent, points>`` in nodes, masses, epsilon and weight; empty for what was not given.

    ``solution`` is what :func:`solve` returned.
    """
    *given, solution, cotangent = arguments
    problem = _problem(*given)
    found = compiled.adjoint(problem, Solution.of(solution), cotangent, set(_DIFFERENTIATED)).by_name
    # Each its own tensor: no two returns of an operator may be the same.
    return tuple(found.get(name, problem.epsilon.new_empty(0)) for name in _DIFFERENTIATED)


_DIFFERENTIATED = {"nodes": 0, "masses": 1, "epsilon": 6, "cost.weight": 7}  # with their places among the given


@adjoint.register_fake
def _(*given: Any) -> tuple[Tensor, ...]:
    tensors = (given[place] for place in _DIFFERENTIATED.values())
    return tuple(given[6].new_empty(0) if one is None else one.new_empty(one.shape) for one in tensors)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.numbers = inputs[8:]
    ctx.save_for_backward(*inputs[:8], *output)


def _differentiate(ctx: Any, cotangents: list[Tensor]) -> tuple[Tensor | None, ...]:
    given, solution = ctx.saved_tensors[:8], list(ctx.saved_tensors[8:])
    found = torch.ops.flowpool.adjoint(*given, *ctx.numbers, solution, cotangents[0])
    gradients: list[Tensor | None] = [None] * (len(given) + len(ctx.numbers))
    for place, gradient in zip(_DIFFERENTIATED.values(), found, strict=True):
        gradients[place] = None if given[place] is None else gradient
    return tuple(gradients)


def _refuse(ctx: Any, *_: Any) -> NoReturn:
    raise RuntimeError("Pooling cannot be differentiated twice; call backward or grad without create_graph.")


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
    points, *others = torch.ops.flowpool.solve(*_given(problem))
    return Solution.of([points, *(value.detach() for value in others)])
