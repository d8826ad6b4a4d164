"""What pooling returns: points, and how well they were found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flowpool.causes import why_singular, why_unfinished
from flowpool.core import sinkhorn
from flowpool.core.flow import Flowed
from flowpool.core.records import lazy
from flowpool.engines import torch_engine as batching
from flowpool.engines.devices import readable
from flowpool.engines.interface import BackwardReport
from flowpool.engines.torch_engine import Framed
from flowpool.status import Status

_CONVERGED = torch.tensor([status.converged for status in sorted(Status)])  # by code


class Behind(NamedTuple):
    """What plans and divergences are computed from, without autograd history."""

    problem: Framed  # all graphs, in their frames
    ended: Flowed
    solvable: Tensor  # (B,) bool
    cost_unit: Tensor  # (B,), how much the frame's unit of cost is outside
    order: Tensor  # (N,), which node of the caller stands at each place


class Ended:
    """What the status and the residual of B graphs say together."""

    status: Tensor
    residual: Tensor
    tolerance: float

    @property
    def converged(self) -> Tensor:
        """Stationary to the tolerance, or settled, or empty, ``(B,)`` bool."""
        return _CONVERGED.to(self.status.device)[self.status.long()]

    @property
    def settled(self) -> Tensor:
        """Ended in a valley, ``(B,)`` bool: SINGULAR, with a Newton step left that is longer than the tolerance, but would lower
        the quadratic model of the divergence by at most ``tolerance^2 R^2``. Where points merge the divergence is flatter than
        its model, and a few times as much may be left.
        """
        return (self.status == Status.SINGULAR.value) & (self.residual > self.tolerance)


@dataclass(frozen=True)
class Pooled(Ended):
    """Pooled points of a batch of B graphs.

    Attributes:
        points: X*, ``(B, M, D)``; zeros for an empty graph, NaN for one with non-finite features.
        residual: length of the Newton step left at X*, relative to the graph's scale R, ``(B,)``. Of graphs that have
            converged only those that are ``settled`` have more than the tolerance.
        steps: ``(B,)``.
        status: :class:`Status` codes, ``(B,)`` int8.
        backward: filled by the backward pass.
        where: the engine that found the points, and the device that it ran on.
        tolerance: on the residual.
    """

    points: Tensor
    residual: Tensor
    steps: Tensor
    status: Tensor
    backward: BackwardReport
    where: str
    tolerance: float
    _behind: Callable[[], Behind] = field(repr=False)
    _on_host: Pooled | None = field(default=None, repr=False)  # the same on the CPU, if it was found there

    @property
    def host(self) -> Pooled:
        """The same where it was found, so that asking for values waits for no device."""
        return self if self._on_host is None else self._on_host

    @lazy
    def _solution(self) -> Behind:
        return self._behind()

    @lazy
    @torch.no_grad()
    def divergence(self) -> Tensor:
        """S_eps(X*, Y), what pooling lost, ``(B,)``; computed when first asked for.

        It includes the transport of each node cloud to itself, whose cost grows with the square of its size. Zero for
        graphs without nodes or with one distinct node, NaN where the points are.
        """
        if self._on_host is not None:
            return readable(self._on_host.divergence, self.points.device)
        problem, ended, solvable, unit, _ = self._solution
        result = torch.where(self.status == Status.NONFINITE_INPUT.value, torch.nan, torch.zeros_like(unit))
        chosen = solvable.nonzero().squeeze(-1)
        for bucket in batching.buckets(replace(problem.select(chosen), debias=True)):
            graphs, energy = chosen[bucket.graphs], bucket.energy
            here = energy.evaluate_from(ended.points[graphs], ended.potential[graphs], None)
            own = energy.geometry.matrix(energy.nodes, energy.nodes)
            nodes = sinkhorn.solve_self(own, energy.masses, energy.epsilon).value(energy.masses)
            value = energy.value(here.points, here) - nodes / 2
            result = result.index_copy(0, graphs, value * unit[graphs])
        return result

    @torch.no_grad()
    def cause(self, graph: int) -> str:
        """Why the minimiser of a graph is not isolated (SINGULAR) or was not reached (MAX_STEPS), in one sentence."""
        status = Status(int(self.status[graph]))
        problem, ended, solvable, _, _ = self._solution
        one = torch.tensor([graph % len(solvable)], device=solvable.device)
        if status not in (Status.SINGULAR, Status.MAX_STEPS):
            return status.advice
        if not bool(solvable[one]):
            return "The graph is one point, which all points are pooled to."
        bucket = next(batching.buckets(problem.select(one)))
        energy = bucket.energy.select(torch.tensor([0], device=one.device))
        here = energy.evaluate_from(ended.points[one], ended.potential[one], None)
        return why_singular(energy, here) if status is Status.SINGULAR else why_unfinished(energy, here)

    @torch.no_grad()
    def plan(self, graph: int) -> Tensor:
        """The optimal coupling of one graph, ``(M, N_g)``: how much of each of its nodes went to each point."""
        num_graphs = self.points.shape[0]
        if not -num_graphs <= graph < num_graphs:
            raise IndexError(f"graph {graph} of a batch of {num_graphs}.")
        if self._on_host is not None:
            return readable(self._on_host.plan(graph), self.points.device)
        one = slice(graph % num_graphs, graph % num_graphs + 1)
        problem, ended, solvable, _, order = self._solution
        nodes, masses = (x.unsqueeze(0) for x in problem.clouds.cloud(one.start))
        as_given = order[problem.clouds.ptr[one.start] : problem.clouds.ptr[one.stop]].argsort()
        if not bool(solvable[one]):
            # One distinct node, or none: every point takes its share of everything.
            value = torch.nan if int(self.status[one]) == Status.NONFINITE_INPUT.value else 1.0
            return value * problem.point_masses[:, None] * masses[0, as_given]
        cost = problem.geometry.matrix(ended.points[one], nodes)
        weights = problem.point_masses.unsqueeze(0)
        solved = sinkhorn.solve(cost, weights, masses, problem.epsilon[one], ended.potential[one])
        return solved.plan[0, :, as_given]
