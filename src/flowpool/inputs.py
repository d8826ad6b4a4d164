"""What a caller hands over, checked in the caller's words: one clear sentence for each mistake."""

from __future__ import annotations

import math
from operator import index as whole_number
from typing import Any

import torch
from torch import Tensor


def checked_count(name: str, value: Any) -> int:
    """A number of things, at least one, as an int; booleans and floats are refused, NumPy's integers are not."""
    try:
        count = None if isinstance(value, bool) else whole_number(value)
    except TypeError:
        count = None
    if count is None:
        raise TypeError(f"{name} is {value!r}; pass a whole number that is at least 1.")
    if count < 1:
        raise ValueError(f"{name} is {count}; pass a whole number that is at least 1.")
    return count


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raises unless the value is one of the choices."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        *most, last = (repr(choice) for choice in choices)
        raise ValueError(f"Unknown {name} {value!r}; pass {', '.join(most)} or {last}.")


def check_flag(name: str, value: Any) -> None:
    """Raises unless the value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; pass True or False.")


def check_number(name: str, value: Any) -> None:
    """Raises unless the value is a real number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; pass a number.")


def check_plain(features: Any) -> None:
    """Raises inside the transforms of torch.func and of TorchScript, which cannot see through what computes here."""
    if torch.jit.is_tracing():
        raise TypeError(
            "torch.jit.trace would record the values of one batch as constants; use torch.compile or torch.export."
        )
    if not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(features):
        raise TypeError(
            "Pooling does not work inside torch.func (grad, jacrev, vmap, ...). Take torch.autograd for gradients, and put "
            "several graphs into one call, by batch or index, instead of vmap."
        )


def checked_epsilon(epsilon: float | Tensor, num_graphs: int, like: Tensor) -> Tensor:
    """Epsilon of each graph, ``(B,)``, with the dtype and the device of another tensor."""
    if not isinstance(epsilon, Tensor):
        check_epsilon(epsilon)
        return like.new_full((num_graphs,), epsilon)
    if not epsilon.is_floating_point():
        raise TypeError(f"epsilon is {epsilon.dtype}; pass a number or a floating-point tensor.")
    if epsilon.dim() > 1 or epsilon.dim() == 1 and epsilon.numel() != num_graphs:
        raise ValueError(
            f"epsilon has shape {tuple(epsilon.shape)}; pass one number, or one per graph, ({num_graphs},)."
        )
    if may_look(epsilon):
        wrong = ~(epsilon.detach().isfinite() & (epsilon.detach() > 0))
        if bool(wrong.any()):
            check_epsilon(float(epsilon.detach()[wrong].flatten()[0]))
    return epsilon.to(like).expand(num_graphs)


def may_look(values: Tensor) -> bool:
    """Whether values may be asked for: nothing has to be waited for, and no graph is being traced."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling()


def check_epsilon(epsilon: Any) -> None:
    """Raises unless epsilon is a finite number > 0."""
    check_number("epsilon", epsilon)
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon is {epsilon}; it must be finite and > 0 (0.1 is a good start).")


def checked_point_masses(point_masses: Tensor | None, num_points: int, like: Tensor) -> Tensor:
    """Masses a of the points, ``(M,)``, summing to one, with the dtype and the device of another tensor."""
    if point_masses is None:
        return like.new_full((num_points,), 1.0 / num_points)
    if not isinstance(point_masses, Tensor) or point_masses.shape != (num_points,):
        found = tuple(point_masses.shape) if isinstance(point_masses, Tensor) else type(point_masses).__name__
        raise ValueError(f"point_masses is {found}; expected a tensor of shape ({num_points},), one mass per point.")
    if not point_masses.is_floating_point():
        raise TypeError(f"point_masses is {point_masses.dtype}; pass point_masses.float().")
    if may_look(point_masses):
        wrong = ~(point_masses.detach().isfinite() & (point_masses.detach() > 0))
        if bool(wrong.any()):
            point = int(wrong.nonzero()[0])
            raise ValueError(
                f"{int(wrong.sum())} point masses are not positive numbers (first: point {point}, "
                f"{float(point_masses[point]):g}). Pass values > 0, or fewer points."
            )
    precise = point_masses.to(like)
    return precise / precise.sum()


def check_like(value: Any, features: Tensor, name: str, features_name: str) -> None:
    """Raises unless a tensor has the dtype and the device of the features that it belongs to.

    Under autocast the dtype of the features is not the caller's choice, so that another one is no mistake.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; pass a tensor, or None.")
    chosen = not (torch.is_autocast_enabled(features.device.type) and value.is_floating_point())
    if chosen and value.dtype != features.dtype:
        raise TypeError(
            f"{name} is {value.dtype}, {features_name} is {features.dtype}; pass {name}.to({features_name}.dtype)."
        )
    if value.device != features.device:
        raise ValueError(f"{name} is on {value.device}, {features_name} is on {features.device}; move one of them.")
