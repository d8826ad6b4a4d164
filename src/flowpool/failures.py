"""What is done about graphs that were not pooled: nothing, a warning once for each kind, or an error."""

from __future__ import annotations

import sys
import warnings

from torch import Tensor

from flowpool.options import OnFailure
from flowpool.status import Status

_INSIDE = ("flowpool", "torch", "torch_geometric")  # packages whose lines say nothing to a caller


def act_on_failures(status: Tensor, on_failure: OnFailure, announced: set[Status], hint: str) -> None:
    """Warns or raises if graphs are not stationary.

    Args:
        status: of each graph, ``(B,)``.
        announced: what has been warned of before, and need not be again; what is warned of now is added.
        hint: where a caller finds more, after a warning.
    """
    if on_failure == "ignore" or not bool(status.any()):
        return
    failures = {kind: text for kind in Status if not kind.converged and (text := _described(status, kind))}
    if failures and on_failure == "raise":
        raise ArithmeticError("\n".join(failures.values()))
    for kind, text in failures.items():
        if kind not in announced:
            announced.add(kind)
            warnings.warn(f"{text} {hint}", RuntimeWarning, stacklevel=_level_of_the_caller())


def graphs_with(status: Tensor, kind: Status) -> list[int]:
    """The graphs that have a status."""
    found: list[int] = (status == kind.value).nonzero().flatten().tolist()
    return found


def _described(status: Tensor, kind: Status) -> str:
    graphs = graphs_with(status, kind)
    first = ", ".join(map(str, graphs[:5])) + (", ..." if len(graphs) > 5 else "")
    return f"{len(graphs)} of {status.numel()} graphs are {kind.name} (graph {first}). {kind.advice}" if graphs else ""


def _level_of_the_caller() -> int:
    """The stacklevel, seen from whoever calls this, of the nearest line that is neither ours nor the frameworks'."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    return level
