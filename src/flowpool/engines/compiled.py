"""The compiled engine: order, frames, solution and gradients as kernels, from tensors to tensors.

It computes what :mod:`flowpool.core` specifies, for the squared Euclidean cost of weighted features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowpool.core.constants import RIDGE, hull_tolerance
from flowpool.core.divergence import Energy, Evaluation
from flowpool.core.measures import Clouds
from flowpool.core.solved import Solved
from flowpool.costs import Geometry, SquaredEuclidean
from flowpool.engines.interface import Gradients, Problem, Solution


def solve(problem: Problem) -> Solution:
    """The pooled points of a batch."""
    from flowpool.kernels import batch as kernels

    nodes, graph, ptr = _arrays(problem.nodes, problem.batch, problem.ptr)
    level, point_masses, reference = _arrays(problem.epsilon, problem.point_masses, problem.reference)
    order = kernels.arrange(nodes, graph, ptr)
    rows = nodes[order]
    masses = kernels.share(_array(problem.masses), order, ptr)
    batch = kernels.make_batch(rows, masses, ptr)
    table = kernels.frame(batch, _feature_weights(problem))
    frames = kernels.Frames.of(table)
    start, epsilon = kernels.begin(frames, reference, point_masses, level, problem.relative)
    options, resolution = problem.options, hull_tolerance(problem.resolution)
    threads = torch.get_num_threads()
    found = kernels.solve(
        batch, frames, start, point_masses, epsilon, resolution, options.tolerance, options.max_steps, threads
    )
    points = kernels.end(frames, found, rows.dtype)
    state = (found.points, found.potentials, found.self_potentials, order, rows, masses, table)
    return Solution.of(map(torch.from_numpy, (points, found.residual, found.steps, found.status, *state)))


def blank(problem: Problem) -> Solution:
    """A solution of the right shapes, for what is traced."""
    nodes, new, (count, features) = problem.nodes, problem.epsilon.new_empty, problem.reference.shape
    graphs, number = problem.num_graphs, nodes.shape[0]
    state = (
        new(graphs, count, features), new(graphs, count), new(graphs, count), new(number, dtype=torch.long),
        nodes.new_empty(nodes.shape), new(number), new(graphs, 3 * features + 3),
    )  # fmt: skip
    steps, status = new(graphs, dtype=torch.long), new(graphs, dtype=torch.int8)
    return Solution(nodes.new_empty(graphs, count, features), new(graphs), steps, status, state)


def adjoint(problem: Problem, solution: Solution, cotangent: Tensor, wanted: set[str]) -> Gradients:
    """Gradients of ``<cotangent, points>``, by the kernels that found the points."""
    from flowpool.kernels import batch as kernels

    inside, potential, self_potential, order, rows, masses, table = _arrays(*solution.state)
    ptr, level, point_masses, reference, upstream = _arrays(
        problem.ptr, problem.epsilon, problem.point_masses, problem.reference, cotangent.double()
    )
    found = kernels.adjoint(
        kernels.make_batch(rows, masses, ptr), order, kernels.Frames.of(table), _feature_weights(problem), reference,
        inside, potential, self_potential, point_masses, level, problem.relative, hull_tolerance(problem.resolution),
        _ridge(problem), upstream, torch.get_num_threads(),
    )  # fmt: skip
    by_name = {"nodes": found.nodes, "epsilon": found.epsilon}
    given = _array(problem.masses)
    if given is not None and "masses" in wanted:
        by_name["masses"] = kernels.unshare(found.masses, given, order, ptr)
    weights = problem.geometry.feature_weights
    if weights is not None:
        by_name["cost.weight"] = found.weights * _array(weights)  # the parameter is the logarithm
    tensors = {name: torch.from_numpy(value) for name, value in by_name.items()}
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
    from flowpool.kernels import batch as kernels
    from flowpool.kernels.frame import CLOUD

    points, potential, _, order, rows, masses, table = solution.state
    mean, scale, _, _, unit, kind = map(torch.from_numpy, kernels.Frames.of(table.numpy()))
    clouds = Clouds.from_ptr(rows.double(), masses, problem.ptr)
    clouds = clouds.moved((clouds.nodes - mean[clouds.batch]) / scale[clouds.batch])
    epsilon = problem.epsilon.detach() if problem.relative else problem.epsilon.detach() / unit**2
    return Solved(
        clouds, order, Geometry(SquaredEuclidean()), problem.point_masses, epsilon, True, unit**2, kind == CLOUD, points,
        potential,
    )  # fmt: skip


def _ridge(problem: Problem) -> float:
    """Lambda in units of the square of the Hessian's scale, 2 / M."""
    ridge, num_points = problem.options.ridge, len(problem.point_masses)
    if ridge is None:
        return RIDGE
    return ridge if problem.relative else ridge * (num_points / 2) ** 2


def _feature_weights(problem: Problem) -> Any:
    weights = problem.geometry.feature_weights
    return np.ones(problem.nodes.shape[1]) if weights is None else _array(weights)


def _array(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().contiguous().numpy()


def _arrays(*tensors: Tensor) -> Any:
    return [_array(tensor) for tensor in tensors]
