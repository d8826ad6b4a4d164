"""Tensors on their way between devices: the kernels run on the CPU, and a model may live elsewhere.

What goes together goes as one row of bytes: one copy, and one wait where the host must have the values before it goes on.
From a GPU that is quicker than the launches that the flow would need there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

HOST = torch.device("cpu")
# Operators that wait for a device, which a CUDA graph cannot record: torch.compile(mode="reduce-overhead") goes around them.
UNRECORDED = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()
_WITHOUT_DOUBLE = ["mps"]  # types of devices
_Function = TypeVar("_Function", bound=Callable[..., Any])


def opaque(fake: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Makes a function an operator that ``torch.compile`` does not look into; ``fake`` gives the shape of its result.

    In eager mode it stays a function, because calling an operator takes longer than small graphs do.
    """

    def decorate(function: _Function) -> _Function:
        operator = torch.library.custom_op(f"flowpool::{function.__name__}", function, mutates_args=(), tags=UNRECORDED)
        operator.register_fake(fake)

        @wraps(function)
        def call(*given: Any) -> Any:
            return operator(*given) if torch.compiler.is_compiling() else function(*given)

        return cast(_Function, call)

    return decorate


def carried(values: Sequence[Any], device: torch.device) -> list[Any]:
    """Copies of tensors on another device; differentiable, and the gradients come back together as well.

    What is no tensor, or is there already, stays what it is.
    """
    found = list(values)
    elsewhere = [place for place, value in enumerate(values) if isinstance(value, Tensor) and value.device != device]
    while elsewhere:  # once, unless the tensors come from several devices
        source = values[elsewhere[0]].device
        going = [place for place in elsewhere if values[place].device == source]
        for place, copy in zip(going, _Carried.apply(device, *(values[place] for place in going)), strict=True):
            found[place] = copy
        elsewhere = [place for place in elsewhere if place not in going]
    return found


def precision_on(device: torch.device) -> torch.dtype:
    """What is computed in on a device: double precision where there is one."""
    return torch.float32 if device.type in _WITHOUT_DOUBLE else torch.float64


def readable(values: Tensor, device: torch.device) -> Tensor:
    """What was computed in double precision, on the device of somebody who wants to read it."""
    return values.to(precision_on(device)).to(device)


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.home = tensors[0].device
        found = tuple(copied_across(list(tensors), device))
        constant = [copy for copy, value in zip(found, tensors, strict=True) if not value.requires_grad]
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = zip(upstream, ctx.needs_input_grad[1:], strict=True)
        gradients = [value if needed else None for value, needed in wanted]
        found = iter(copied_across([value for value in gradients if value is not None], ctx.home))
        return (None, *(None if value is None else next(found) for value in gradients))


@opaque(lambda tensors, device: [value.new_empty(value.shape, device=device) for value in tensors])
def copied_across(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copies on another device of tensors that are all on one; either of the two is the host."""
    # By falling size of their numbers, so that each begins at a multiple of its own.
    order = sorted(range(len(tensors)), key=lambda place: -tensors[place].itemsize)
    rows = [tensors[place].detach().contiguous().flatten().view(torch.uint8) for place in order]
    lengths = [len(row) for row in rows]
    # Memory that a CUDA device reads and writes by itself; others have none, or no promise when it is free again.
    pinned = "cuda" in (device.type, tensors[0].device.type)
    on_host = torch.empty(sum(lengths), dtype=torch.uint8, pin_memory=pinned)
    if device.type == "cpu":
        arrived = on_host.copy_(torch.cat(rows))  # waits for all that was asked of the device before
    else:
        arrived = torch.cat(rows, out=on_host).to(device, non_blocking=pinned)
    found = list(tensors)
    for place, row in zip(order, arrived.split(lengths), strict=True):
        # A copy for each: no two results of an operator may share memory, and one may be changed in place.
        found[place] = row.view(tensors[place].dtype).view(tensors[place].shape).clone()
    return found
