"""What the paper leaves open about FlowPool, to be varied for all pools of the bench that run its flow."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from flowpool.lab.names import Gradient, Reference, UpdateStep


@dataclass(frozen=True)
class FlowSettings:
    """Settings of the flow; None stands for the default of :class:`flowpool.FlowPool`.

    Attributes:
        epsilon: entropic regularisation.
        relative: epsilon in units of each graph's variance, and the reference placed on each graph. Otherwise both are
            absolute, as in the paper, and a normal reference has variance one in every feature.
        reference: drawn from a normal distribution, or k-means centres of the training nodes.
        reference_seed: one for all folds; None draws another reference for each fold.
        debias: descend the Sinkhorn divergence; otherwise the entropic loss alone.
        steps: at most so many.
        step_size: a fixed step of Algorithm 1.
        update_step: runs Algorithm 1 exactly as printed, with the step size as its tau.
        ridge: lambda of the backward pass.
        gradient: through the optimality condition, or through the recorded steps.
    """

    epsilon: float = 0.1
    relative: bool = True
    reference: Reference = "normal"
    reference_seed: int | None = None
    debias: bool = True
    steps: int | None = None
    step_size: float | None = None
    update_step: UpdateStep | None = None
    ridge: float | None = None
    gradient: Gradient = "implicit"

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon is {self.epsilon}; pass a positive number, like 0.1.")
        if self.reference not in get_args(Reference):
            raise ValueError(f"Unknown reference {self.reference!r}; pass {', '.join(get_args(Reference))}.")
        if self.gradient not in get_args(Gradient):
            raise ValueError(f"Unknown gradient {self.gradient!r}; pass {', '.join(get_args(Gradient))}.")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"{self.steps} steps; pass at least 1.")
        longest = 1 if self.update_step is None else math.inf
        if self.step_size is not None and not 0 < self.step_size <= longest:
            raise ValueError(f"The step size is {self.step_size}; pass a value above 0 and up to {longest}.")
        if self.update_step not in (None, *get_args(UpdateStep)):
            raise ValueError(f"Unknown update step {self.update_step!r}; pass {', '.join(get_args(UpdateStep))}.")
        if self.update_step is not None and self.step_size is None:
            raise ValueError("An update step needs a step size, the tau of Algorithm 1.")
        if self.ridge is not None and not 0 <= self.ridge < math.inf:
            raise ValueError(f"The ridge is {self.ridge}; pass a value of at least 0.")

    def changed(self) -> dict[str, Any]:
        """What is not as it is by default."""
        default = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != default[name]}

    def layer_options(self) -> dict[str, Any]:
        """The arguments of :class:`flowpool.FlowPool`, apart from its reference."""
        given = {
            "max_steps": self.steps,
            "step_size": self.step_size,
            "update_step": self.update_step,
            "ridge": self.ridge,
        }
        return {
            "epsilon": self.epsilon,
            "relative": self.relative,
            "debias": self.debias,
            "gradient": self.gradient,
            **{name: value for name, value in given.items() if value is not None},
        }
