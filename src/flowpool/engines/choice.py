"""Which engine pools: the compiled one where it can, else torch. Both give the same answers."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from flowpool.costs import Cost, SquaredEuclidean, is_weighing
from flowpool.engines.interface import Problem
from flowpool.options import Options

_log = logging.getLogger("flowpool")
_said: set[str] = set()


def missing_kernels() -> str | None:
    """Why there are no kernels in this process; ``None`` if there are."""
    if not _missing:
        _missing.append(_import_kernels())
    return _missing[0]


_missing: list[str | None] = []  # what was found when kernels were first asked for


def _import_kernels() -> str | None:
    try:
        import flowpool.kernels.batch  # noqa: F401
    except Exception as error:  # noqa: BLE001 - a broken numba may raise anything at import
        return f"numba cannot be used ({type(error).__name__}: {error})"
    return None


def give_up_kernels(reason: str, problem: Problem) -> None:
    """Remembers that kernels cannot be compiled here; an error if they were asked for, else torch will do."""
    _broken.append(reason)
    use_kernels(problem.options, problem.geometry.cost, problem.point_masses, problem.relative)


_broken: list[str] = []


def use_kernels(options: Options, cost: Cost, point_masses: Tensor | None, relative: bool) -> bool:
    """Whether the compiled engine is to be used; an error if it is asked for and cannot serve."""
    name = options.engine
    if name == "torch":
        return False
    obstacle = _obstacle(options, cost, point_masses, relative)
    if obstacle is None:
        absent = (_broken[0] if _broken else None) or missing_kernels()
        if absent is None:
            return True
        if name == "compiled":
            raise ValueError(f"The compiled engine cannot be used: {absent}. Pass engine='torch' or 'auto'.")
        say_once(f"{absent}: pooling with the torch engine, which gives the same points some fifty times more slowly.")
        return False
    if name == "compiled":
        raise ValueError(f"The compiled engine cannot be used: {obstacle}. Pass engine='torch' or 'auto'.")
    return False


def _obstacle(options: Options, cost: Cost, point_masses: Tensor | None, relative: bool) -> str | None:
    """What about the problem the compiled engine cannot do."""
    if options.gradient == "unrolled":
        return "it does not record the steps, as gradient='unrolled' must"
    if not is_weighing(cost):
        return f"it knows the squared Euclidean cost, not {cost}"
    if not options.debias:
        return "it descends the Sinkhorn divergence, not the loss alone (debias=False)"
    if options.update_step is not None:
        return "it does not run Algorithm 1 exactly as printed (update_step is given)"
    if options.step_size is not None:
        return "it chooses its steps itself (step_size is given)"
    if not (isinstance(cost, SquaredEuclidean) or relative or options.ridge is None):
        return "it knows the ridge of a Mahalanobis cost in relative units only (relative=False)"
    if isinstance(point_masses, Tensor) and point_masses.requires_grad and torch.is_grad_enabled():
        return "it gives no gradient in point_masses"
    return None


def say_where(device: torch.device) -> None:
    """Logs once that batches of another device are pooled on the CPU."""
    if not torch.compiler.is_compiling():
        say_once(
            f"Graphs on {device} are pooled by kernels on the CPU and brought back, which is quicker for small graphs; "
            "pass engine='torch' to stay on the device."
        )


def say_once(text: str) -> None:
    """Logs a warning, unless it has been logged before."""
    if text not in _said:
        _said.add(text)
        _log.warning(text)
