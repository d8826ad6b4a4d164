"""What pooling returns: points, and how well they were found."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self, TypeVar, overload

import torch
from torch import Tensor

from flowpool.causes import why_singular, why_unfinished
from flowpool.engines.devices import readable
from flowpool.engines.interface import BackwardReport, Engine, Problem, Solution
from flowpool.status import Status

Value = TypeVar("Value")
_CONVERGED = torch.tensor([status.converged for status in sorted(Status)])  # by code


class lazy(cached_property[Value]):  # noqa: N801 - a decorator
    """A property that is computed when it is first asked for.

    Python's own holds a lock up to version 3.11, one for all objects: threads wait for one another, and a child that was
    forked meanwhile waits for ever.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> Value: ...

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        if instance is None:
            return self
        assert self.attrname is not None  # noqa: S101 - it has been given a name in a class
        value = instance.__dict__[self.attrname] = self.func(instance)
        return value


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
    _engine: Engine = field(repr=False)
    _problem: Problem = field(repr=False)  # without autograd history
    _solution: Solution = field(repr=False)
    _on_host: Pooled | None = field(default=None, repr=False)  # the same on the CPU, if it was found there

    @property
    def host(self) -> Pooled:
        """The same where it was found, so that asking for values waits for no device."""
        return self if self._on_host is None else self._on_host

    @lazy
    @torch.no_grad()
    def divergence(self) -> Tensor:
        """S_eps(X*, Y), what pooling lost, ``(B,)``; computed when first asked for.

        It includes the transport of each node cloud to itself, whose cost grows with the square of its size. Zero for
        graphs without nodes or with one distinct node, NaN where the points are.
        """
        if self._on_host is not None:
            return readable(self._on_host.divergence, self.points.device)
        found = self._engine.divergence(self._problem, self._solution)
        return torch.where(self.status == Status.NONFINITE_INPUT.value, torch.nan, found)

    @torch.no_grad()
    def cause(self, graph: int) -> str:
        """Why the minimiser of a graph is not isolated (SINGULAR) or was not reached (MAX_STEPS), in one sentence."""
        host, graph = self.host, self._place(graph)
        status = Status(int(host.status[graph]))
        if status not in (Status.SINGULAR, Status.MAX_STEPS):
            return status.advice
        end = host._engine.at_end(host._problem, host._solution, graph)
        if end is None:
            return "The graph is one point, which all points are pooled to."
        return why_singular(*end) if status is Status.SINGULAR else why_unfinished(*end)

    @torch.no_grad()
    def plan(self, graph: int) -> Tensor:
        """The optimal coupling of one graph, ``(M, N_g)``: how much of each of its nodes went to each point."""
        graph = self._place(graph)
        if self._on_host is not None:
            return readable(self._on_host.plan(graph), self.points.device)
        plan = self._engine.plan(self._problem, self._solution, graph)
        return plan.fill_(torch.nan) if int(self.status[graph]) == Status.NONFINITE_INPUT else plan

    def _place(self, graph: int) -> int:
        num_graphs = self.points.shape[0]
        if not -num_graphs <= graph < num_graphs:
            raise IndexError(f"graph {graph} of a batch of {num_graphs}.")
        return graph % num_graphs
