"""Rows of numbers without an owner: a pointer and a distance between rows.

A Numba array carries seven words and a reference count that is updated whenever it is passed on, which for arrays of a few
dozen numbers costs more than the arithmetic. :class:`Rows` are two words that live in registers. They do not keep their
memory alive: whoever makes them holds the array for as long as they are used.

``rows[i, j]`` reads and writes one number; ``j`` may run on into the rows that follow. In checked mode
(:mod:`flowpool.kernels.machine.jit`) rows also know how many numbers they have, and an access outside of them raises.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

from flowpool.kernels.machine.jit import CHECKED


class Rows(types.Type):
    """Type of a row-major matrix of float64 numbers."""


rows_type = Rows("flowpool.Rows")
_WORD = ir.IntType(64)


@register_model(Rows)
class _RowsModel(models.StructModel):
    def __init__(self, manager: Any, frontend_type: Any) -> None:
        members = [("data", types.CPointer(types.float64)), ("stride", types.intp)]
        super().__init__(manager, frontend_type, members + [("size", types.intp)] * CHECKED)


def item_pointer(context: Any, builder: Any, rows: Any, row: Any, column: Any, width: int = 1) -> Any:
    """LLVM pointer to the first of ``width`` neighbouring entries of rows."""
    structure = cgutils.create_struct_proxy(rows_type)(context, builder, value=rows)
    place = builder.add(builder.mul(row, structure.stride), column)
    if CHECKED:
        low = builder.icmp_signed("<", place, ir.Constant(_WORD, 0))
        high = builder.icmp_signed(">", builder.add(place, ir.Constant(_WORD, width)), structure.size)
        with builder.if_then(builder.or_(low, high), likely=False):
            context.call_conv.return_user_exc(builder, IndexError, ("a kernel reaches outside of its rows",))
    return builder.gep(structure.data, [place])


def make_rows(context: Any, builder: Any, data: Any, stride: Any, size: Any) -> Any:
    """Rows from an LLVM pointer, the distance between rows, and how many numbers there are."""
    structure = cgutils.create_struct_proxy(rows_type)(context, builder)
    structure.data, structure.stride = data, stride
    if CHECKED:
        structure.size = size
    return structure._getvalue()


@type_callable(operator.getitem)
def _type_read(_context: Any) -> Any:
    def typer(rows: Any, _index: Any) -> Any:
        return types.float64 if isinstance(rows, Rows) else None

    return typer


@type_callable(operator.setitem)
def _type_write(_context: Any) -> Any:
    def typer(rows: Any, _index: Any, _value: Any) -> Any:
        return types.none if isinstance(rows, Rows) else None

    return typer


def _entry(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    row, column = cgutils.unpack_tuple(builder, arguments[1])
    kinds = signature.args[1].types
    row, column = (
        context.cast(builder, value, kind, types.intp) for value, kind in zip((row, column), kinds, strict=True)
    )
    return item_pointer(context, builder, arguments[0], row, column)


@lower_builtin(operator.getitem, Rows, types.BaseTuple)
def _read(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.load(_entry(context, builder, signature, arguments))


@lower_builtin(operator.setitem, Rows, types.BaseTuple, types.Number)
def _write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    value = context.cast(builder, arguments[2], signature.args[2], types.float64)
    builder.store(value, _entry(context, builder, signature, arguments))
    return context.get_dummy_value()


@intrinsic
def rows_of(_context: Any, array: Any) -> Any:
    """The rows of a two-dimensional C-contiguous float64 array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        structure = context.make_array(signature.args[0])(context, builder, arguments[0])
        stride = builder.extract_value(structure.shape, 1)
        return make_rows(context, builder, structure.data, stride, structure.nitems)

    return rows_type(array), generate


@intrinsic
def part(_context: Any, rows: Any, offset: Any, stride: Any) -> Any:
    """Rows of another length that start ``offset`` numbers after the first."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        structure = cgutils.create_struct_proxy(rows_type)(context, builder, value=arguments[0])
        size = builder.sub(structure.size, arguments[1]) if CHECKED else None
        return make_rows(context, builder, builder.gep(structure.data, [arguments[1]]), arguments[2], size)

    return rows_type(rows_type, types.intp, types.intp), generate


@intrinsic
def from_column(_context: Any, rows: Any, column: Any) -> Any:
    """The same rows without their first ``column`` numbers."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        structure = cgutils.create_struct_proxy(rows_type)(context, builder, value=arguments[0])
        size = builder.sub(structure.size, arguments[1]) if CHECKED else None
        return make_rows(context, builder, builder.gep(structure.data, [arguments[1]]), structure.stride, size)

    return rows_type(rows_type, types.intp), generate


@intrinsic
def stay_apart(_context: Any) -> Any:
    """Marks the function it is called in: the compiler shall neither copy it into its callers nor unroll its loops.

    The loops work on whole lanes already. Unrolled and copied they run no faster, and take minutes to compile.
    """

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.function.attributes.add("noinline")
        builder.function.attributes.add("optsize")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def draw(_context: Any, counter: Any) -> Any:
    """The number in ``counter[0]``, an int64 array, which is raised by one for all threads."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        structure = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.atomic_rmw("add", structure.data, ir.Constant(_WORD, 1), "monotonic")

    return types.int64(counter), generate
