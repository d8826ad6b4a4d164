"""Rows of numbers without an owner: a pointer and a distance between rows.

A Numba array carries seven words and a reference count that is updated whenever it is passed on, which for arrays of a few
dozen numbers costs more than the arithmetic. :class:`Rows` are two words that live in registers. They do not keep their
memory alive: whoever makes them with :func:`rows_of` holds the array for as long as they are used.

``rows[i, j]`` reads and writes one number. Indices are not checked and never negative.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model


class Rows(types.Type):
    """Type of a row-major matrix of floating-point numbers."""

    def __init__(self, number: Any) -> None:
        self.number = number
        super().__init__(name=f"flowpool.Rows({number})")


rows_type = Rows(types.float64)
singles_type = Rows(types.float32)
_INDEX = types.UniTuple(types.intp, 2)


@register_model(Rows)
class _RowsModel(models.StructModel):
    def __init__(self, manager: Any, frontend_type: Any) -> None:
        members = [("data", types.CPointer(frontend_type.number)), ("stride", types.intp)]
        super().__init__(manager, frontend_type, members)


def item_pointer(context: Any, builder: Any, kind: Rows, rows: Any, row: Any, column: Any) -> Any:
    """LLVM pointer to one entry of rows of some kind."""
    structure = cgutils.create_struct_proxy(kind)(context, builder, value=rows)
    return builder.gep(structure.data, [builder.add(builder.mul(row, structure.stride), column)])


@infer_global(operator.getitem)
class _ReadTemplate(AbstractTemplate):
    def generic(self, arguments: Any, keywords: Any) -> Any:
        if isinstance(arguments[0], Rows):
            return signature(arguments[0].number, arguments[0], _INDEX)
        return None


@infer_global(operator.setitem)
class _WriteTemplate(AbstractTemplate):
    def generic(self, arguments: Any, keywords: Any) -> Any:
        if isinstance(arguments[0], Rows):
            return signature(types.none, arguments[0], _INDEX, arguments[0].number)
        return None


@lower_builtin(operator.getitem, Rows, types.UniTuple)
def _read(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    row, column = cgutils.unpack_tuple(builder, arguments[1])
    return builder.load(item_pointer(context, builder, signature.args[0], arguments[0], row, column))


@lower_builtin(operator.setitem, Rows, types.UniTuple, types.Float)
def _write(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    row, column = cgutils.unpack_tuple(builder, arguments[1])
    builder.store(arguments[2], item_pointer(context, builder, signature.args[0], arguments[0], row, column))
    return context.get_dummy_value()


def make_rows(context: Any, builder: Any, data: Any, stride: Any, kind: Rows = rows_type) -> Any:
    """Rows of some kind from an LLVM pointer and the distance between rows."""
    structure = cgutils.create_struct_proxy(kind)(context, builder)
    structure.data, structure.stride = data, stride
    return structure._getvalue()


@intrinsic
def rows_of(_context: Any, array: Any) -> Any:
    """The rows of a two-dimensional C-contiguous float64 array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        structure = context.make_array(signature.args[0])(context, builder, arguments[0])
        stride = builder.extract_value(structure.shape, 1)
        return make_rows(context, builder, structure.data, stride)

    return rows_type(array), generate


@intrinsic
def part(_context: Any, rows: Any, offset: Any, stride: Any) -> Any:
    """Rows of another length that start ``offset`` numbers after the first."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        structure = cgutils.create_struct_proxy(rows_type)(context, builder, value=arguments[0])
        return make_rows(context, builder, builder.gep(structure.data, [arguments[1]]), arguments[2])

    return rows_type(rows_type, types.intp, types.intp), generate


@intrinsic
def from_column(_context: Any, rows: Any, column: Any) -> Any:
    """The same rows without their first ``column`` numbers."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        structure = cgutils.create_struct_proxy(rows_type)(context, builder, value=arguments[0])
        return make_rows(context, builder, builder.gep(structure.data, [arguments[1]]), structure.stride)

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
        return builder.atomic_rmw("add", structure.data, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), generate
