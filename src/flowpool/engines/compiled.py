"""The compiled engine: order, frames, solution and gradients as kernels, from tensors to tensors.

It computes what :mod:`flowpool.core` specifies, for the squared Euclidean cost of weighted features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowpool.core.constants import RIDGE, hull_tolerance
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
    per_graph = (found.residual, found.steps, found.status, found.singular)
    ends = (found.points, found.potentials, found.self_potentials)
    return Solution(*map(torch.from_numpy, (points, *per_graph, *ends, order, rows, masses, table)))


def adjoint(problem: Problem, solution: Solution, cotangent: Tensor, wanted: set[str]) -> Gradients:
    """Gradients of ``<cotangent, points>``, by the kernels that found the points."""
    from flowpool.kernels import batch as kernels

    inside, potential, self_potential, order, rows, masses, table = _arrays(*solution[5:])
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
