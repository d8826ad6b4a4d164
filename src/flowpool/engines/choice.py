"""Who finds the stationary points: the torch engine for everything, the compiled one where it can.

Both give the same answers. The torch engine sees all graphs of a batch in their frames and a mask of those to solve; the
compiled one (:mod:`flowpool.engines.compiled`) takes them into their frames itself.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from flowpool.core.flow import Flowed
from flowpool.costs import Geometry
from flowpool.engines import torch_engine as batching
from flowpool.engines.torch_engine import BackwardResult, Problem

HAS_NUMBA = find_spec("numba") is not None
NO_NUMBA = "numba is not installed"
_log = logging.getLogger("flowpool")
_said: set[str] = set()


def use_kernels(
    name: Literal["auto", "compiled", "torch"],
    nodes: Tensor,
    geometry: Geometry,
    point_masses: Tensor,
    debias: bool,
    gradient: str,
    step_size: float | None,
) -> bool:
    """Whether the compiled engine is to be used; an error if it is asked for and cannot serve."""
    if name == "torch":
        return False
    obstacle = _obstacle(nodes, geometry, point_masses, debias, gradient, step_size)
    if obstacle is None:
        return True
    if name == "compiled":
        raise ValueError(f"The compiled engine cannot be used: {obstacle}. Pass engine='torch' or 'auto'.")
    if obstacle == NO_NUMBA and obstacle not in _said:
        _said.add(obstacle)
        _log.warning("numba is not installed: pooling with the torch engine, which gives the same points more slowly.")
    return False


def _obstacle(
    nodes: Tensor,
    geometry: Geometry,
    point_masses: Tensor,
    debias: bool,
    gradient: str,
    step_size: float | None,
) -> str | None:
    """Why the compiled engine cannot serve."""
    if gradient == "unrolled":
        return "it does not record the steps, as gradient='unrolled' must"
    if nodes.device.type != "cpu":
        return f"it runs on the CPU, the nodes are on {nodes.device}"
    if not geometry.is_squared_euclidean and geometry.feature_weights is None:
        return f"it knows the squared Euclidean cost, not {geometry.cost}"
    if not debias:
        return "it descends the Sinkhorn divergence, not the loss alone (debias=False)"
    if step_size is not None:
        return "it chooses its steps itself (step_size is given)"
    if point_masses.requires_grad and torch.is_grad_enabled():
        return "it gives no gradient in point_masses"
    if not HAS_NUMBA:
        return NO_NUMBA
    return None


def solve(problem: Problem, solvable: Tensor, tolerance: float, max_steps: int, step_size: float | None) -> Flowed:
    """:func:`flowpool.engines.torch_engine.solve` on the solvable graphs, with zeros for the others."""
    part, chosen = _solvable_part(problem, solvable)
    ended = batching.solve(part, tolerance, max_steps, step_size)
    return ended if chosen is None else spread(ended, chosen, problem.start)


def adjoint(
    problem: Problem, solvable: Tensor, ended: Flowed, cotangent: Tensor, ridge: float, wanted: set[str]
) -> BackwardResult:
    """:func:`flowpool.engines.torch_engine.adjoint` on the solvable graphs, with zeros for the others."""
    part, chosen = _solvable_part(problem, solvable)
    if chosen is None:
        return batching.adjoint(part, ended, cotangent, ridge, wanted)
    end = Flowed(*(value[chosen] for value in ended))
    found = batching.adjoint(part, end, cotangent[chosen], ridge, wanted)
    own, clouds, count = solvable[problem.clouds.batch], problem.clouds, len(solvable)
    return found._replace(
        nodes=torch.zeros_like(clouds.nodes).masked_scatter(own[:, None], found.nodes),
        masses=torch.zeros_like(clouds.masses).masked_scatter(own, found.masses),
        epsilon=_rows(found.epsilon, chosen, count),
        residual=_rows(found.residual, chosen, count),
        damped=_rows(found.damped, chosen, count),
    )


def _solvable_part(problem: Problem, solvable: Tensor) -> tuple[Problem, Tensor | None]:
    """The problem of the graphs to solve, and which they are; ``None`` if they are all."""
    if bool(solvable.all()):
        return problem, None
    chosen = solvable.nonzero().squeeze(-1)
    return problem.select(chosen), chosen


def spread(ended: Flowed, chosen: Tensor, start: Tensor) -> Flowed:
    """Results of some graphs among all graphs, with zeros for the others."""
    return Flowed(*(_rows(value, chosen, start.shape[0]) for value in ended))


def _rows(value: Tensor, chosen: Tensor, count: int) -> Tensor:
    return value.new_zeros(count, *value.shape[1:]).index_copy(0, chosen, value)
