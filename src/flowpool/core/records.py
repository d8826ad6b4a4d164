"""Entries of (nested) records of batched tensors: taken out, put back, chosen between two records."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import Tensor

Record = TypeVar("Record")


def take(record: Record, index: Tensor) -> Record:
    """The entries at some places, ``(K,)`` int64."""
    return _each(lambda value: value[index], record)


def put(record: Record, index: Tensor, entries: Record) -> Record:
    """The record with the entries at some places replaced."""
    return _each(lambda value, new: value.index_copy(0, index, new), record, entries)


def choose(first: Tensor, one: Record, other: Record) -> Record:
    """Entries of one record where ``first`` holds, ``(B,)`` bool, of the other elsewhere; the host learns nothing."""
    return _each(lambda x, y: torch.where(first.view(-1, *[1] * (x.dim() - 1)), x, y), one, other)


def places(mask: Tensor, keep_pairs: bool) -> Tensor:
    """Where the mask holds, ``(K,)``; a lone place stands twice if it must not be computed alone.

    A batch of one rounds differently from a batch of more.
    """
    index = mask.nonzero().squeeze(-1)
    return index.repeat(2) if keep_pairs and index.numel() == 1 else index


def _each(function: Callable[..., Tensor], first: Record, *others: Record) -> Record:
    """The record of what a function makes of corresponding tensors; ``None`` stays."""
    if first is None:
        return first
    if isinstance(first, Tensor):
        return cast(Record, function(first, *others))
    if hasattr(first, "__dataclass_fields__"):
        values = [[getattr(record, name) for record in (first, *others)] for name in first.__dataclass_fields__]
    else:
        values = [list(entries) for entries in zip(first, *others, strict=True)]  # type: ignore[call-overload]
    return type(first)(*(_each(function, *entries) for entries in values))
