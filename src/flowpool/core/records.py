"""Entries of (nested) records of batched tensors: taken out and put back; values that a record computes when asked."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Self, TypeVar, cast, overload

import torch
from torch import Tensor

Record = TypeVar("Record")
Value = TypeVar("Value")


class lazy(cached_property[Value]):  # noqa: N801 - a decorator
    """A property that is computed when it is first asked for.

    Python's own holds a lock up to version 3.11, one for all objects: threads wait for one another, and a child that was
    forked meanwhile waits for ever.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> Value: ...

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        if instance is None:
            return self
        assert self.attrname is not None  # noqa: S101 - it has been given a name in a class
        value = instance.__dict__[self.attrname] = self.func(instance)
        return value


def sent(values: list[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers that the host knows, on a device, without waiting for what that is doing."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def take(record: Record, index: Tensor) -> Record:
    """The entries at some places, ``(K,)`` int64."""
    return _each(lambda value: value[index], record)


def put(record: Record, index: Tensor, entries: Record) -> Record:
    """The record with the entries at some places replaced."""
    return _each(lambda value, new: value.index_copy(0, index, new), record, entries)


def mix(chosen: Tensor, entries: Record, record: Record) -> Record:
    """The entries where they are chosen, ``(B,)`` bool, and those of the record elsewhere."""
    masks = [chosen.view(-1, *[1] * more) for more in range(3)]
    return _each(lambda new, value: torch.where(masks[value.dim() - 1], new, value), entries, record)


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
    found = tuple(_each(function, *entries) for entries in values)
    return cast(Record, found) if type(first) is tuple else type(first)(*found)
