"""What a layer tells about its last call, and what it does about graphs that were not pooled."""

from __future__ import annotations

import sys
import threading
import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowpool.engines.devices import readable
from flowpool.options import OnFailure
from flowpool.results import BackwardReport, Pooled
from flowpool.status import Status

_INSIDE = ("flowpool", "torch", "torch_geometric")  # packages whose lines say nothing to a caller


@dataclass(frozen=True)
class Report:
    """How well the graphs of one call were pooled; holds neither features nor autograd history.

    Attributes:
        status: :class:`flowpool.Status` codes, ``(B,)`` int8.
        converged: stationary to the tolerance, or empty, ``(B,)`` bool.
        residual: length of the Newton step left, relative to the graph's scale, ``(B,)``; of a single step, the largest
            relative error of the shares that the points received.
        steps: ``(B,)``.
        backward: filled by the backward pass.
        where: the engine that pooled, and the device that it ran on.
    """

    status: Tensor
    converged: Tensor
    residual: Tensor
    steps: Tensor
    backward: BackwardReport
    where: str

    @staticmethod
    def of(pooled: Pooled) -> Report:
        """The report of a call of :func:`flowpool.flow_pool`, where the points were found."""
        found = pooled.host
        return Report(found.status, found.converged, found.residual.detach(), found.steps, found.backward, found.where)

    def on(self, device: torch.device) -> Report:
        """The same on a device."""
        if self.status.device == device:
            return self
        return replace(
            self,
            status=self.status.to(device),
            converged=self.converged.to(device),
            residual=readable(self.residual, device),
            steps=self.steps.to(device),
        )

    def graphs(self, status: Status) -> list[int]:
        """The graphs that have a status."""
        found: list[int] = (self.status == status.value).nonzero().flatten().tolist()
        return found

    def __str__(self) -> str:
        counts = ", ".join(f"{len(found)} {status.name}" for status in Status if (found := self.graphs(status)))
        if not counts:
            return "no graphs"
        worst = float(self.residual.nan_to_num(0.0).max())
        summary = f"{self.status.numel()} graphs: {counts}; at most {int(self.steps.max())} steps, residual {worst:.1e}"
        return f"{summary}; {self.where}"


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
            raise RuntimeError("There is no report yet: the layer has not been called in this thread.")
        report, device = self._last
        return report.on(device)

    def conclude(self, report: Report, device: torch.device, on_failure: OnFailure) -> None:
        """Keeps the report of a call with tensors on a device, and acts on graphs that were not pooled."""
        self._last = report, device
        if on_failure == "ignore" or bool(report.converged.all()):
            return
        failures = {s: _describe(report, s) for s in Status if not s.converged and report.graphs(s)}
        if on_failure == "raise":
            raise ArithmeticError("\n".join(failures.values()))
        for status, text in failures.items():
            if status not in self._announced:
                self._announced.add(status)
                text = f"{text} Shown once per layer and kind; the layer's report has every call."
                warnings.warn(text, RuntimeWarning, stacklevel=_level_of_the_caller())


def _describe(report: Report, status: Status) -> str:
    graphs = report.graphs(status)
    first = ", ".join(map(str, graphs[:5])) + (", ..." if len(graphs) > 5 else "")
    return f"{len(graphs)} of {report.status.numel()} graphs are {status.name} (graph {first}). {status.advice}"


def _level_of_the_caller() -> int:
    """The stacklevel, seen from whoever calls this, of the nearest line that is neither ours nor the frameworks'."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    return level
