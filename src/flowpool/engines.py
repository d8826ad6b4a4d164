"""Who finds the stationary points: the torch engine for everything, the compiled one where it can.

Both give the same answers. An engine sees all graphs of a batch in their frames and a mask of those to solve.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, Protocol

import torch
from torch import Tensor

from flowpool import batching
from flowpool.batching import BackwardResult, Problem
from flowpool.flow import Flowed


class Engine(Protocol):
    """What an engine can do."""

    def solve(
        self, problem: Problem, solvable: Tensor, tolerance: float, max_steps: int, step_size: float | None
    ) -> Flowed: ...

    def adjoint(
        self,
        problem: Problem,
        solvable: Tensor,
        ended: Flowed,
        cotangent: Tensor,
        ridge: float,
        wanted: set[str],
    ) -> BackwardResult: ...


class TorchEngine:
    """:mod:`flowpool.batching` on the solvable graphs."""

    def solve(
        self, problem: Problem, solvable: Tensor, tolerance: float, max_steps: int, step_size: float | None
    ) -> Flowed:
        chosen = solvable.nonzero().squeeze(-1)
        ended = batching.solve(problem.select(chosen), tolerance, max_steps, step_size)
        return spread(ended, chosen, problem.start)

    def adjoint(
        self,
        problem: Problem,
        solvable: Tensor,
        ended: Flowed,
        cotangent: Tensor,
        ridge: float,
        wanted: set[str],
    ) -> BackwardResult:
        chosen = solvable.nonzero().squeeze(-1)
        part = Flowed(*(value[chosen] for value in ended))
        found = batching.adjoint(problem.select(chosen), part, cotangent[chosen], ridge, wanted)
        own = solvable[problem.clouds.batch]
        return found._replace(
            nodes=problem.clouds.nodes.new_zeros(problem.clouds.nodes.shape).masked_scatter(own[:, None], found.nodes),
            masses=problem.clouds.masses.new_zeros(problem.clouds.masses.shape).masked_scatter(own, found.masses),
            epsilon=_rows(found.epsilon, chosen, len(solvable)),
            residual=_rows(found.residual, chosen, len(solvable)),
            damped=_rows(found.damped, chosen, len(solvable)),
        )


def spread(ended: Flowed, chosen: Tensor, start: Tensor) -> Flowed:
    """Results of some graphs among all graphs, with zeros for the others."""
    return Flowed(*(_rows(value, chosen, start.shape[0]) for value in ended))


def _rows(value: Tensor, chosen: Tensor, count: int) -> Tensor:
    return value.new_zeros(count, *value.shape[1:]).index_copy(0, chosen, value)


def choose(name: Literal["auto", "compiled", "torch"], problem: Problem, step_size: float | None) -> Engine:
    """The engine for a problem; an error if the compiled one is asked for and cannot serve it."""
    if name == "torch":
        return TorchEngine()
    obstacle = _obstacle(problem, step_size)
    if obstacle is None and name == "compiled":
        from flowpool.compiled import CompiledEngine

        return CompiledEngine()
    if name == "compiled":
        raise ValueError(f"The compiled engine cannot be used: {obstacle}. Pass engine='torch' or 'auto'.")
    return TorchEngine()


def _obstacle(problem: Problem, step_size: float | None) -> str | None:
    """Why the compiled engine cannot serve a problem."""
    if problem.start.device.type != "cpu":
        return f"it runs on the CPU, the nodes are on {problem.start.device}"
    if not problem.geometry.is_squared_euclidean:
        return f"it knows the squared Euclidean cost, not {problem.geometry.cost}"
    if not problem.debias:
        return "it descends the Sinkhorn divergence, not the loss alone (debias=False)"
    if step_size is not None:
        return "it chooses its steps itself (step_size is given)"
    if problem.point_masses.requires_grad and torch.is_grad_enabled():
        return "it gives no gradient in point_masses"
    if find_spec("numba") is None:
        return "numba is not installed"
    return None
