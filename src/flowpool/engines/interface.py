"""The seam between pooling and what computes it: an engine is two functions on three records.

    solve(Problem) -> Solution
    adjoint(Problem, Solution, cotangent, wanted) -> Gradients

:mod:`flowpool.engines.compiled` and :mod:`flowpool.engines.torch_engine` have these functions, and :func:`pooled_by` makes one
differentiable function of either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

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
    """Pooled points of B graphs, and what their gradients, plans and divergences are computed from.

    Attributes:
        points: X*, in the precision of the nodes, ``(B, M, D)``; zeros for an empty graph, NaN for a broken one.
        residual: ``(B,)``, NaN for broken graphs.
        steps: ``(B,)`` int64.
        status: :class:`flowpool.Status` codes, ``(B,)`` int8.
        singular: the Hessian has flat directions, ``(B,)`` bool.
        inside: X* in the frames of the graphs, ``(B, M, D)``; zeros for graphs without a flow.
        potential: f, ``(B, M)``.
        self_potential: h, ``(B, M)``.
        order: which node of the caller stands at each place when they are sorted, ``(N,)``.
        nodes, masses, frames: what the compiled engine keeps for its backward pass; empty otherwise.
    """

    points: Tensor
    residual: Tensor
    steps: Tensor
    status: Tensor
    singular: Tensor
    inside: Tensor
    potential: Tensor
    self_potential: Tensor
    order: Tensor
    nodes: Tensor
    masses: Tensor
    frames: Tensor


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
    """A module with these two functions."""

    def solve(self, problem: Problem) -> Solution:
        """The pooled points; nothing is raised for numerical trouble in one graph."""

    def adjoint(self, problem: Problem, solution: Solution, cotangent: Tensor, wanted: set[str]) -> Gradients:
        """Gradients in the tensors whose names are wanted, given the gradient in the points, ``(B, M, D)``."""


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
    tensors = problem.tensors()
    call = _Call(engine, problem.detached(), tuple(tensors), report)
    return Solution(*_Pool.apply(call, *tensors.values()))


class _Call(NamedTuple):
    engine: Engine
    problem: Problem  # without autograd history
    names: tuple[str, ...]
    report: BackwardReport


class _Pool(torch.autograd.Function):
    """The pooled points, with the derivative of section 8.2."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        solution = call.engine.solve(call.problem)
        ctx.call = call
        ctx.save_for_backward(*tensors, *solution)
        ctx.mark_non_differentiable(*solution[1:])
        ctx.set_materialize_grads(False)
        return tuple(solution)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        call: _Call = ctx.call
        names = call.names
        if upstream is None:
            return (None,) * (1 + len(names))
        saved = ctx.saved_tensors  # also notices a tensor that was changed in place
        problem = call.problem.having(dict(zip(names, saved[: len(names)], strict=True)))
        wanted = {name for name, needed in zip(names, ctx.needs_input_grad[1:], strict=True) if needed}
        found = call.engine.adjoint(problem, Solution(*saved[len(names) :]), upstream, wanted)
        call.report.conclude(found.residual, found.damped)
        return (None, *(found.by_name.get(name) if name in wanted else None for name in names))
