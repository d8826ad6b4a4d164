"""What lies between pooling and the engines that compute it.

    solve(Problem) -> Solution
    adjoint(Problem, Solution, cotangent, wanted) -> Gradients
    plan(Problem, Solution, graph), divergence(Problem, Solution), at_end(Problem, Solution, graph)

:mod:`flowpool.engines.compiled` and :mod:`flowpool.engines.torch_engine` have these functions, and :func:`pooled_by` makes one
differentiable function of either.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flowpool.core.divergence import Energy, Evaluation
from flowpool.core.once import refuse_second_derivatives
from flowpool.costs import Geometry
from flowpool.engines.devices import readable
from flowpool.options import Options

_OF_COST = "cost."  # before the name of a parameter of the cost


@dataclass(frozen=True)
class Problem:
    """What is pooled, as it was given and after all checks.

    Attributes:
        nodes: Y of all graphs, in the caller's order, float32 or float64, ``(N, D)``.
        masses: b, ``(N,)``, not normalised; ``None``: equal.
        batch: graph of each node, ``(N,)`` int64.
        ptr: offsets of the graphs once their nodes are sorted, ``(B + 1,)``.
        reference: X^(0), in the solver's precision, ``(M, D)``.
        point_masses: a, normalised, in the solver's precision, ``(M,)``.
        epsilon: in the solver's precision, ``(B,)``.
        relative: epsilon and the reference are in units of the graph.
        geometry: the cost.
        resolution: relative precision that the nodes were given in; finer differences are rounding.
        options: how the points are found and differentiated.
    """

    nodes: Tensor
    masses: Tensor | None
    batch: Tensor
    ptr: Tensor
    reference: Tensor
    point_masses: Tensor
    epsilon: Tensor
    relative: bool
    geometry: Geometry
    resolution: float
    options: Options

    @property
    def num_graphs(self) -> int:
        return self.ptr.shape[0] - 1

    def tensors(self) -> dict[str, Tensor]:
        """What pooled points can be differentiated in, by name."""
        found = {"nodes": self.nodes, "point_masses": self.point_masses, "epsilon": self.epsilon}
        if self.masses is not None:
            found["masses"] = self.masses
        return found | {_OF_COST + name: value for name, value in self.geometry.tensors.items()}

    def having(self, tensors: dict[str, Tensor]) -> Problem:
        """The same problem with other tensors of these names."""
        parameters = {name: tensors[_OF_COST + name] for name in self.geometry.tensors}
        given: dict[str, Any] = {name: value for name, value in tensors.items() if not name.startswith(_OF_COST)}
        return replace(self, **given, geometry=replace(self.geometry, tensors=parameters))

    def detached(self) -> Problem:
        """The same without autograd history."""
        return self.having({name: value.detach() for name, value in self.tensors().items()})


class Solution(NamedTuple):
    """Pooled points of B graphs.

    Attributes:
        points: X*, in the precision of the nodes, ``(B, M, D)``; zeros for an empty graph, NaN for a broken one.
        residual: ``(B,)``, NaN for broken graphs.
        steps: ``(B,)`` int64.
        status: :class:`flowpool.Status` codes, ``(B,)`` int8.
        state: what the engine keeps for gradients, plans and divergences; nobody else reads it. None of it is memory of the
            caller's tensors.
    """

    points: Tensor
    residual: Tensor
    steps: Tensor
    status: Tensor
    state: tuple[Tensor, ...]

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors in a row, for autograd and for operators."""
        return (*self[:4], *self.state)

    @staticmethod
    def of(tensors: Iterable[Tensor]) -> Solution:
        """The solution that was put in a row."""
        points, residual, steps, status, *state = tensors
        return Solution(points, residual, steps, status, tuple(state))


class Gradients(NamedTuple):
    """Gradients of ``<cotangent, points>``.

    Attributes:
        by_name: those asked for, by the names of :meth:`Problem.tensors`.
        residual: of the linear systems, ``(B,)``.
        damped: the Hessian has flat directions, so that the ridge decided along them, ``(B,)`` bool.
    """

    by_name: dict[str, Tensor]
    residual: Tensor
    damped: Tensor


class Engine(Protocol):
    """A module with these functions."""

    def solve(self, problem: Problem) -> Solution:
        """The pooled points; nothing is raised for numerical trouble in one graph."""

    def adjoint(self, problem: Problem, solution: Solution, cotangent: Tensor, wanted: set[str]) -> Gradients:
        """Gradients in the tensors whose names are wanted, given the gradient in the points, ``(B, M, D)``."""

    def plan(self, problem: Problem, solution: Solution, graph: int) -> Tensor:
        """The optimal coupling of a graph that is not broken, ``(M, N_g)``, its nodes in the caller's order."""

    def divergence(self, problem: Problem, solution: Solution) -> Tensor:
        """S_eps(X*, Y), ``(B,)``; zero for graphs that are one point, or empty, anything for broken ones."""

    def at_end(self, problem: Problem, solution: Solution, graph: int) -> tuple[Energy, Evaluation] | None:
        """What a graph descended, with its gradient at X*; ``None`` if the graph needed no flow."""


class BackwardReport:
    """Quality of the last backward pass, per graph.

    Attributes:
        residual: of the linear solve, ``(B,)``; ``None`` before the first backward pass.
        damped: whether the Hessian was singular, so that the ridge decided along its flat directions, ``(B,)`` bool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device  # the caller's; what the kernels found stays on the host until somebody asks
        self._found: list[tuple[Tensor, Tensor]] = []  # of the last backward pass

    @property
    def residual(self) -> Tensor | None:
        return readable(self._found[0][0], self._device) if self._found else None

    @property
    def damped(self) -> Tensor | None:
        return self._found[0][1].to(self._device) if self._found else None

    def on(self, device: torch.device) -> BackwardReport:
        """The same for somebody who reads it on a device; the backward pass may be still to come."""
        other = BackwardReport(device)
        other._found = self._found
        return other

    def conclude(self, residual: Tensor, damped: Tensor) -> None:
        """Keeps what a backward pass found."""
        self._found[:] = [(residual, damped)]

    def __repr__(self) -> str:
        if not self._found:
            return "BackwardReport(no backward pass yet)"
        residual, damped = self._found[0]
        worst = float(residual.nan_to_num(0.0).max()) if residual.numel() else 0.0
        return f"BackwardReport({residual.numel()} graphs, {int(damped.sum())} damped, residual {worst:.1e})"


def pooled_by(engine: Engine, problem: Problem, report: BackwardReport) -> Solution:
    """The solution of a problem; its points are differentiable in every tensor of the problem."""
    return Solution.of(_Pool.apply(engine, problem.detached(), report, *problem.tensors().values()))


class _Pool(torch.autograd.Function):
    """The pooled points, with the derivative of section 8.2."""

    @staticmethod
    def forward(
        ctx: Any, engine: Engine, problem: Problem, report: BackwardReport, *given: Tensor
    ) -> tuple[Tensor, ...]:
        solution = engine.solve(problem).tensors()
        ctx.engine, ctx.problem, ctx.report = engine, problem, report
        ctx.save_for_backward(*given, *solution)
        ctx.mark_non_differentiable(*solution[1:])
        ctx.set_materialize_grads(False)
        return solution

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        names, needed = list(ctx.problem.tensors()), ctx.needs_input_grad[3:]
        if upstream is None:
            return (None,) * (3 + len(names))
        saved = ctx.saved_tensors  # also notices a tensor that was changed in place
        problem = ctx.problem.having(dict(zip(names, saved, strict=False)))
        wanted = {name for name, is_needed in zip(names, needed, strict=True) if is_needed}
        found = ctx.engine.adjoint(problem, Solution.of(saved[len(names) :]), upstream, wanted)
        ctx.report.conclude(found.residual, found.damped)
        return (None, None, None, *(found.by_name.get(name) if name in wanted else None for name in names))
