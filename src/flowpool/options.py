"""What a caller may choose about how points are found and differentiated, declared and checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from flowpool.core.constants import RIDGE


@dataclass(frozen=True)
class Options:
    """How the points are found and differentiated; the arguments of the same names of :func:`flow_pool`."""

    debias: bool = True
    gradient: Literal["implicit", "unrolled", "none"] = "implicit"
    tolerance: float = 1e-5
    max_steps: int = 1000
    step_size: float | None = None
    ridge: float = RIDGE
    engine: Literal["auto", "compiled", "torch"] = "auto"

    def __post_init__(self) -> None:
        if self.gradient not in ("implicit", "unrolled", "none"):
            raise ValueError(f"Unknown gradient {self.gradient!r}; pass 'implicit', 'unrolled' or 'none'.")
        if self.engine not in ("auto", "compiled", "torch"):
            raise ValueError(f"Unknown engine {self.engine!r}; pass 'auto', 'compiled' or 'torch'.")
        if not self.tolerance > 0 or not math.isfinite(self.tolerance):
            raise ValueError(f"tolerance is {self.tolerance}; pass a small positive number, like 1e-5.")
        if self.max_steps < 1:
            raise ValueError(f"max_steps is {self.max_steps}; pass at least 1.")
        if self.step_size is not None and not 0 < self.step_size <= 1:
            raise ValueError(
                f"step_size is {self.step_size}; pass a value in (0, 1], or None to let the error choose it."
            )
        if not self.ridge >= 0 or not math.isfinite(self.ridge):
            raise ValueError(f"ridge is {self.ridge}; pass a value >= 0.")
