"""Entries of (nested) records of batched tensors: taken out and put back."""

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


def mix(chosen: Tensor, entries: Record, record: Record) -> Record:
    """The entries where they are chosen, ``(B,)`` bool, and those of the record elsewhere."""
    return _each(lambda new, value: torch.where(chosen.view(-1, *[1] * (value.dim() - 1)), new, value), entries, record)


def blank(record: Record, count: int) -> Record:
    """A record of so many entries, all zero."""
    return _each(lambda value: value.new_zeros(count, *value.shape[1:]), record)


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
