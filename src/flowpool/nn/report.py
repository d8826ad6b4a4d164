"""What a layer reports about its last call, and what it does about graphs that were not pooled."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowpool.engines.devices import readable
from flowpool.failures import act_on_failures, graphs_with
from flowpool.options import OnFailure
from flowpool.results import BackwardReport, Ended, Pooled
from flowpool.status import Status


@dataclass(frozen=True)
class Report(Ended):
    """How well the graphs of one call were pooled; holds neither features nor autograd history.

    Attributes:
        status: :class:`flowpool.Status` codes, ``(B,)`` int8.
        residual: length of the Newton step left, relative to the graph's scale, ``(B,)``; of a single step, the largest
            relative error of the shares that the points received.
        steps: ``(B,)``.
        backward: filled by the backward pass.
        where: the engine that pooled, and the device that it ran on.
        tolerance: on the residual.
    """

    status: Tensor
    residual: Tensor
    steps: Tensor
    backward: BackwardReport
    where: str
    tolerance: float

    @staticmethod
    def of(pooled: Pooled) -> Report:
        """The report of a call of :func:`flowpool.flow_pool`, where the points were found."""
        found = pooled.host
        return Report(found.status, found.residual.detach(), found.steps, found.backward, found.where, found.tolerance)

    def on(self, device: torch.device) -> Report:
        """The same on a device."""
        if self.status.device == device:
            return self
        return replace(
            self,
            status=self.status.to(device),
            residual=readable(self.residual, device),
            steps=self.steps.to(device),
            backward=self.backward.on(device),
        )

    def graphs(self, status: Status) -> list[int]:
        """The graphs that have a status."""
        return graphs_with(self.status, status)

    def __str__(self) -> str:
        counts = ", ".join(f"{len(found)} {status.name}" for status in Status if (found := self.graphs(status)))
        if not counts:
            return "no graphs"
        if bool(self.settled.any()):
            counts += f" ({int(self.settled.sum())} settled in a valley)"
        worst = float(self.residual.nan_to_num(0.0).max())
        graphs, steps = self.status.numel(), int(self.steps.max())
        summary = f"{graphs} graph{'s' * (graphs != 1)}: {counts}; at most {steps} step{'s' * (steps != 1)}"
        return f"{summary}, residual {worst:.1e}; {self.where}"


class Memory(threading.local):
    """What a layer remembers of its calls, for each thread; no computation reads it, and every copy starts blank."""

    def __init__(self) -> None:
        self._last: tuple[Report, torch.device] | None = None
        self._announced: set[Status] = set()

    def __reduce__(self) -> tuple[type[Memory], tuple[()]]:
        return Memory, ()

    @property
    def report(self) -> Report:
        """How well the last call in this thread went."""
        if self._last is None:
            raise RuntimeError(
                "There is no report yet: the layer has not been called in this thread. (torch.jit.trace asks for it and is "
                "not supported; use torch.compile or torch.export.)"
            )
        report, device = self._last
        return report.on(device)

    def conclude(self, report: Report, device: torch.device, on_failure: OnFailure) -> None:
        """Keeps the report of a call with tensors on a device, and acts on graphs that were not pooled."""
        self._last = report, device
        hint = "Shown once per layer and kind of status; the layer's report has the status of every graph."
        act_on_failures(report.status, on_failure, self._announced, hint)
