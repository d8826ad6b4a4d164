"""What a caller may choose about how points are found and differentiated: the words, their defaults, and their check.

:func:`flowpool.flow_pool` explains each option; layers take the same ones, with the same defaults.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from flowpool.core import updates
from flowpool.core.updates import UpdateStep
from flowpool.inputs import check_choice, check_flag, check_number, checked_count

Gradient = Literal["implicit", "unrolled", "none"]
Engine = Literal["auto", "compiled", "torch"]
OnFailure = Literal["ignore", "warn", "raise"]
Size = Literal["append", "scale"]
GRADIENTS, ENGINES, ON_FAILURE, SIZES = map(get_args, (Gradient, Engine, OnFailure, Size))


@dataclass(frozen=True)
class Options:
    """How the points are found and differentiated; the arguments of the same names of :func:`flowpool.flow_pool`."""

    debias: bool = True
    gradient: Gradient = "implicit"
    tolerance: float = 1e-5
    max_steps: int = 1000
    step_size: float | None = None
    update_step: str | UpdateStep | None = None
    ridge: float | None = None
    engine: Engine = "auto"

    def __post_init__(self) -> None:
        check_flag("debias", self.debias)
        check_choice("gradient", self.gradient, GRADIENTS)
        check_choice("engine", self.engine, ENGINES)
        check_number("tolerance", self.tolerance)
        if not self.tolerance > 0 or not math.isfinite(self.tolerance):
            raise ValueError(f"tolerance is {self.tolerance}; pass a small positive number, like 1e-5.")
        checked_count("max_steps", self.max_steps)
        if self.step_size is not None:
            check_number("step_size", self.step_size)
            if self.update_step is not None and not 0 < self.step_size < math.inf:
                raise ValueError(f"step_size is {self.step_size}; pass the tau of Algorithm 1, a value > 0.")
            if self.update_step is None and not 0 < self.step_size <= 1:
                raise ValueError(
                    f"step_size is {self.step_size}; pass a value in (0, 1], or None to let the error choose it."
                )
        if self.update_step is not None:
            updates.resolve(self.update_step)
            if self.step_size is None:
                raise ValueError("update_step needs a step_size, the tau of Algorithm 1.")
        if self.ridge is not None:
            check_number("ridge", self.ridge)
            if not self.ridge >= 0 or not math.isfinite(self.ridge):
                raise ValueError(f"ridge is {self.ridge}; pass a value >= 0.")
