"""Who finds the stationary points: the torch engine for everything, the compiled one where it can.

Both give the same answers. An engine sees all graphs of a batch in their frames and a mask of those to solve.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from flowpool import batching
from flowpool.batching import BackwardResult, Problem
from flowpool.flow import Flowed
from flowpool.status import Status

HAS_NUMBA = find_spec("numba") is not None
NO_NUMBA = "numba is not installed"
_log = logging.getLogger("flowpool")
_said: set[str] = set()
_FLAT = 1e-13  # size of a direction, relative to the largest, that is rounding


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
        part, chosen = _solvable_part(problem, solvable)
        ended = batching.solve(part, tolerance, max_steps, step_size)
        return ended if chosen is None else spread(ended, chosen, problem.start)

    def adjoint(
        self,
        problem: Problem,
        solvable: Tensor,
        ended: Flowed,
        cotangent: Tensor,
        ridge: float,
        wanted: set[str],
    ) -> BackwardResult:
        part, chosen = _solvable_part(problem, solvable)
        if chosen is None:
            return batching.adjoint(part, ended, cotangent, ridge, wanted)
        end = Flowed(*(value[chosen] for value in ended))
        return _among_all(batching.adjoint(part, end, cotangent[chosen], ridge, wanted), problem, solvable, chosen)


class CompiledEngine:
    """:mod:`flowpool.compiled` on the solvable graphs.

    Where a Hessian is singular its backward pass hands over to the torch engine, which has the eigenvectors.
    """

    def solve(
        self, problem: Problem, solvable: Tensor, tolerance: float, max_steps: int, step_size: float | None
    ) -> Flowed:
        from flowpool.compiled import engine

        part, chosen = _solvable_part(problem, solvable)
        nodes, masses, ptr, weights, epsilon = _arrays(*_given(part))
        (start,) = _arrays(part.start)
        threads = torch.get_num_threads()
        found = engine.solve(
            nodes, masses, ptr, start, weights, epsilon, _hull_tolerance(part), tolerance, max_steps, threads
        )
        points, potential, self_potential, residual, steps, status, singular = map(torch.from_numpy, found)
        residual = residual.masked_fill(status == Status.NONFINITE.value, torch.nan)
        ended = Flowed(points, potential, self_potential, residual, steps, singular)
        return ended if chosen is None else spread(ended, chosen, problem.start)

    def adjoint(
        self,
        problem: Problem,
        solvable: Tensor,
        ended: Flowed,
        cotangent: Tensor,
        ridge: float,
        wanted: set[str],
    ) -> BackwardResult:
        from flowpool.compiled import engine

        part, chosen = _solvable_part(problem, solvable)
        nodes, masses, ptr, weights, epsilon = _arrays(*_given(part))
        ends = (ended.points, ended.potential, ended.self_potential, cotangent)
        points, potential, self_potential, upstream = _arrays(*(x if chosen is None else x[chosen] for x in ends))
        threads = torch.get_num_threads()
        found = engine.adjoint(
            nodes, masses, ptr, points, potential, self_potential, weights, epsilon, _hull_tolerance(part), ridge,
            upstream, threads,
        )  # fmt: skip
        to_nodes, to_masses, to_epsilon, residual, sound = map(torch.from_numpy, found)
        own = BackwardResult(to_nodes, to_masses, torch.zeros_like(part.point_masses), to_epsilon, {}, residual, ~sound)
        result = own if chosen is None else _among_all(own, problem, solvable, chosen)
        if bool(sound.all()):
            return result
        rest = _adjoint_in_span(problem, result.damped, ended, cotangent, ridge, wanted)
        return result._replace(
            nodes=result.nodes + rest.nodes,
            masses=result.masses + rest.masses,
            epsilon=result.epsilon + rest.epsilon,
            residual=torch.where(result.damped, rest.residual, result.residual),
            damped=rest.damped,
        )


def _adjoint_in_span(
    problem: Problem, hard: Tensor, ended: Flowed, cotangent: Tensor, ridge: float, wanted: set[str]
) -> BackwardResult:
    """The torch engine's adjoint of some graphs, found in the few directions that nodes, points and cotangent span.

    A graph with many equal points has few distinct nodes, so that its eigenvectors are cheap there. The squared
    Euclidean cost does not notice the rotation.
    """
    chosen = hard.nonzero().squeeze(-1)
    part = problem.select(chosen)
    clouds, points, upstream = part.clouds, ended.points[chosen], cotangent[chosen]
    spans = [_span(clouds.cloud(k)[0], points[k], upstream[k]) for k in range(len(chosen))]
    width = max(span.shape[1] for span in spans)
    basis = torch.stack([torch.nn.functional.pad(span, (0, width - span.shape[1])) for span in spans])  # (K, D, width)
    own = basis[clouds.batch]  # (N, D, width)

    def turned(value: Tensor) -> Tensor:
        return (value.unsqueeze(-1) * basis.unsqueeze(1)).sum(-2)  # (K, M, width)

    inside = clouds.moved((clouds.nodes.unsqueeze(-1) * own).sum(-2))
    end = Flowed(*(value[chosen] for value in ended))._replace(points=turned(points))
    found = batching.adjoint(
        replace(part, clouds=inside, start=turned(part.start)), end, turned(upstream), ridge, wanted
    )
    nodes = (own * found.nodes.unsqueeze(-2)).sum(-1)
    return _among_all(found._replace(nodes=nodes), problem, hard, chosen)


def _span(*rows: Tensor) -> Tensor:
    """Orthonormal basis of what the rows span, ``(D, K)``: Gram-Schmidt, the longest row first.

    A decomposition of the library would round differently for another number of threads.
    """
    rest = torch.cat(rows)
    squares = rest.square().sum(-1)
    least = _FLAT**2 * squares.max()
    found: list[Tensor] = []
    while len(found) < rest.shape[1] and bool(squares.max() > least):
        direction = rest[squares.argmax()]
        for _ in range(2):  # twice is enough to be orthogonal to rounding
            for earlier in found:
                direction = direction - (direction * earlier).sum() * earlier
        found.append(direction / direction.square().sum().sqrt())
        rest = rest - (rest * found[-1]).sum(-1, keepdim=True) * found[-1]
        squares = rest.square().sum(-1)
    return torch.stack(found, -1)


def _solvable_part(problem: Problem, solvable: Tensor) -> tuple[Problem, Tensor | None]:
    """The problem of the graphs to solve, and which they are; ``None`` if they are all."""
    if bool(solvable.all()):
        return problem, None
    chosen = solvable.nonzero().squeeze(-1)
    return problem.select(chosen), chosen


def _given(problem: Problem) -> tuple[Tensor, ...]:
    clouds = problem.clouds
    return clouds.nodes, clouds.masses, clouds.ptr, problem.point_masses, problem.epsilon


def _hull_tolerance(problem: Problem) -> float:
    """Distance from the hull of the nodes, relative to the farthest, that is rounding."""
    return max(1e-10, 10 * problem.resolution)


def _arrays(*tensors: Tensor) -> list[Any]:
    return [tensor.contiguous().numpy() for tensor in tensors]


def _among_all(found: BackwardResult, problem: Problem, solvable: Tensor, chosen: Tensor) -> BackwardResult:
    """Gradients of some graphs among all graphs, with zeros for the others."""
    own, clouds = solvable[problem.clouds.batch], problem.clouds
    return found._replace(
        nodes=torch.zeros_like(clouds.nodes).masked_scatter(own[:, None], found.nodes),
        masses=torch.zeros_like(clouds.masses).masked_scatter(own, found.masses),
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
    if obstacle is None:
        return CompiledEngine()
    if name == "compiled":
        raise ValueError(f"The compiled engine cannot be used: {obstacle}. Pass engine='torch' or 'auto'.")
    if obstacle == NO_NUMBA and obstacle not in _said:
        _said.add(obstacle)
        _log.warning("numba is not installed: pooling with the torch engine, which gives the same points more slowly.")
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
    if not HAS_NUMBA:
        return NO_NUMBA
    return None
