"""The compiled engine: order, frames, solution and gradients as kernels, from tensors to tensors.

It computes what :mod:`flowpool.core` specifies, for the squared Euclidean cost of weighted features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowpool.core.constants import RIDGE, hull_tolerance
from flowpool.core.divergence import Energy, Evaluation
from flowpool.core.measures import Clouds
from flowpool.core.solved import Solved
from flowpool.costs import Geometry, SquaredEuclidean
from flowpool.engines.interface import Gradients, Problem, Solution
from flowpool.kernels.records import CLOUD, KIND, UNIT, Given, Kept


def solve(problem: Problem) -> Solution:
    """The pooled points of a batch."""
    from flowpool.kernels import batch as kernels

    graph, ptr = _arrays(problem.batch, problem.ptr)
    options = problem.options
    given = _given(problem, kernels.arrange(graph, ptr))
    found, kept = kernels.solve(given, options.tolerance, options.max_steps, torch.get_num_threads())
    points, *others = map(torch.from_numpy, (*found, *kept))
    return Solution.of((points.to(problem.nodes.dtype), *others))


def blank(problem: Problem) -> Solution:
    """A solution of the right shapes, for what is traced."""
    nodes, new, (count, features) = problem.nodes, problem.epsilon.new_empty, problem.reference.shape
    graphs, number, width = problem.num_graphs, nodes.shape[0], -(-features // 8) * 8
    state = (
        new(number, dtype=torch.long), new(number, dtype=torch.long), new(number), new(number, features),
        new(number + graphs * count, width), new(graphs, 3, features), new(graphs, 7), new(graphs, count, features + 2),
    )  # fmt: skip
    steps, status = new(graphs, dtype=torch.long), new(graphs, dtype=torch.int8)
    return Solution(nodes.new_empty(graphs, count, features), new(graphs), steps, status, state)


def adjoint(problem: Problem, solution: Solution, cotangent: Tensor, wanted: set[str]) -> Gradients:
    """Gradients of ``<cotangent, points>``, by the kernels that found the points."""
    from flowpool.kernels import batch as kernels

    kept = Kept(*_arrays(*solution.state))
    upstream = _array(cotangent.double())
    found = kernels.adjoint(_given(problem, kept.order), kept, upstream, _ridge(problem), torch.get_num_threads())
    by_name = {"nodes": found.nodes, "epsilon": found.epsilon}
    if problem.masses is not None and "masses" in wanted:
        by_name["masses"] = found.masses
    weights = problem.geometry.feature_weights
    if weights is not None:
        by_name["cost.weight"] = found.weights.sum(0) * _array(weights)  # the parameter is the logarithm
    tensors = {name: torch.from_numpy(value) for name, value in by_name.items()}
    for name in tensors.keys() & {"nodes", "masses"}:
        tensors[name] = tensors[name].to(problem.nodes.dtype)
    return Gradients(tensors, torch.from_numpy(found.residual), torch.from_numpy(found.damped))


def plan(problem: Problem, solution: Solution, graph: int) -> Tensor:
    """The optimal coupling of a graph, ``(M, N_g)``."""
    return _solved(problem, solution).plan(graph)


def divergence(problem: Problem, solution: Solution) -> Tensor:
    """S_eps(X*, Y), ``(B,)``."""
    return _solved(problem, solution).divergence()


def at_end(problem: Problem, solution: Solution, graph: int) -> tuple[Energy, Evaluation] | None:
    """The energy of a graph at its pooled points; ``None`` if it needed no flow."""
    return _solved(problem, solution).at_end(graph)


def _solved(problem: Problem, solution: Solution) -> Solved:
    """The graphs in coordinates of their own: any rotation keeps the cost."""
    order, distinct, masses, coordinates, _, _, facts, ends = solution.state  # those of Kept
    starts = problem.ptr[:-1].repeat_interleave(problem.ptr.diff())
    clouds = Clouds.from_ptr(coordinates[starts + distinct], masses, problem.ptr)
    unit, cloud = facts[:, UNIT], facts[:, KIND] == CLOUD
    epsilon = problem.epsilon.detach() if problem.relative else problem.epsilon.detach() / unit**2
    potentials = ends[:, :, -2:].mT / epsilon[:, None, None]  # of the nodes and of the points
    return Solved(
        clouds, order, Geometry(SquaredEuclidean()), problem.point_masses, epsilon, True, unit**2, cloud,
        ends[:, :, :-2].contiguous(), potentials,
    )  # fmt: skip


def _given(problem: Problem, order: Any) -> Given:
    """What the kernels are given, in double precision, with a node for each place."""
    none = problem.epsilon.new_empty(0)
    masses = none if problem.masses is None else problem.masses
    weights = problem.geometry.feature_weights
    ones = problem.epsilon.new_ones(problem.nodes.shape[1])
    nodes, shares, ptr, level = _arrays(problem.nodes.double(), masses.double(), problem.ptr, problem.epsilon)
    ones, reference, points = _arrays(ones if weights is None else weights, problem.reference, problem.point_masses)
    resolution = hull_tolerance(problem.resolution)
    return Given(nodes, shares, order, ptr, ones, reference, points, level, problem.relative, resolution)


def _ridge(problem: Problem) -> float:
    """Lambda in units of the square of the Hessian's scale, 2 / M."""
    ridge, num_points = problem.options.ridge, len(problem.point_masses)
    if ridge is None:
        return RIDGE
    return ridge if problem.relative else ridge * (num_points / 2) ** 2


def _array(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().numpy()


def _arrays(*tensors: Tensor) -> Any:
    return [_array(tensor) for tensor in tensors]
