"""Gradients that are not differentiated again: a second derivative is refused, never guessed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def refuse_second_derivatives(what: str = "Pooling") -> None:
    """Raises in a backward pass that is itself to be differentiated."""
    # Grad mode is on in a backward pass only under create_graph. Not every input makes the result require a gradient,
    # so that a check of the result alone would let a wrong second derivative through.
    if torch.is_grad_enabled():
        raise RuntimeError(f"{what} cannot be differentiated twice; call backward or grad without create_graph.")


def once(value: Tensor, what: str) -> Tensor:
    """The same value, of which there are first derivatives only."""
    result: Tensor = _Once.apply(value, what)
    return result


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, what: str) -> Tensor:
        ctx.what = what
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivatives(ctx.what)
        return upstream, None
