"""Memory of the kernels: records of arrays that are laid out one behind the other in a buffer.

A :class:`Table` declares the shape of each array beside its name, in terms of sizes that are known when a graph is met
(M points, N nodes, ...). Where an array begins, how far its rows are apart and how many numbers the buffer must have all
come from that declaration, by :func:`arranger`; whoever arranges a table then makes the buffer as large as it says. So no
array can be placed outside of it.

``work.gibbs`` in a kernel reads the place of ``gibbs`` and is the :class:`~flowpool.kernels.machine.rows.Rows` there. A table
is passed on as two words. Handing each array on by itself would fill the stack at every call, and the compiler's time with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, models, register_model

from flowpool.kernels.machine.jit import CHECKED, shared
from flowpool.kernels.machine.linear import padded
from flowpool.kernels.machine.rows import make_rows, rows_type

LINE = 8  # float64 numbers in a line of the cache
PLACE = 3  # words that tell where an array is: its first number, the distance between rows, how many numbers it has
_NUMBER, _DOUBLES = 0, 1
_KINDS = {_NUMBER: types.intp, _DOUBLES: rows_type}
_NUMBERS, _PLACES = types.CPointer(types.float64), types.CPointer(types.intp)


class Field(NamedTuple):
    """An array of a table, or a number; rows and columns are names of sizes."""

    kind: int
    rows: int
    columns: int


def doubles(rows: int, columns: int) -> Field:
    """An array of float64 numbers; its rows are padded to a multiple of eight."""
    return Field(_DOUBLES, rows, columns)


def number(size: int) -> Field:
    """One of the sizes."""
    return Field(_NUMBER, size, size)


class Table(types.Type):
    """Type of a record whose fields are arrays, sizes, or tables again.

    Attributes:
        fields: the place and the declaration of each field.
        shapes: the declarations of all places, ``(places, 3)``.
    """

    def __init__(self, name: str, **fields: Field | Table) -> None:
        self.fields: dict[str, tuple[int, Field | Table]] = {}
        shapes: list[Any] = []
        for field, kind in fields.items():
            self.fields[field] = len(shapes), kind
            shapes.extend(kind.shapes if isinstance(kind, Table) else [kind])
        self.shapes: Any = np.array(shapes, np.int64)
        super().__init__(name=f"flowpool.{name}")


@register_model(Table)
class _TableModel(models.StructModel):
    def __init__(self, manager: Any, frontend_type: Any) -> None:
        super().__init__(manager, frontend_type, [("numbers", _NUMBERS), ("places", _PLACES)])


@infer_getattr
class _Fields(AttributeTemplate):
    key = Table

    def generic_resolve(self, table: Table, name: str) -> Any:
        if name not in table.fields:
            return None
        kind = table.fields[name][1]
        return kind if isinstance(kind, Table) else _KINDS[kind.kind]


def _at(builder: Any, places: Any, index: int) -> Any:
    return builder.gep(places, [ir.Constant(ir.IntType(64), index)])


@lower_getattr_generic(Table)
def _field(context: Any, builder: Any, table: Table, value: Any, name: str) -> Any:
    whole = cgutils.create_struct_proxy(table)(context, builder, value=value)
    place, kind = table.fields[name]
    if isinstance(kind, Table):
        part = cgutils.create_struct_proxy(kind)(context, builder)
        part.numbers, part.places = whole.numbers, _at(builder, whole.places, PLACE * place)
        return part._getvalue()
    first = builder.load(_at(builder, whole.places, PLACE * place))
    if kind.kind == _NUMBER:
        return first
    data, stride = builder.gep(whole.numbers, [first]), builder.load(_at(builder, whole.places, PLACE * place + 1))
    size = builder.load(_at(builder, whole.places, PLACE * place + 2)) if CHECKED else None
    return make_rows(context, builder, data, stride, size)


@shared
def aligned(numbers):  # type: ignore[no-untyped-def]
    """A buffer whose first number begins a line of the cache, and with it every row of every table that is laid out there.

    Elsewhere each load of eight numbers takes two lines, which costs a tenth of the time or more.
    """
    whole = np.empty(numbers + LINE - 1)
    start = -(np.int64(whole.ctypes.data) // 8) % LINE
    return whole[start : start + numbers]


def arranger(table: Table) -> Any:
    """A function ``(sizes, places) -> numbers``: gives every field a place and says how long the buffer has to be."""
    shapes = table.shapes

    @shared
    def arrange(sizes, places):  # type: ignore[no-untyped-def]
        used = 0
        for k in range(len(shapes)):
            rows, columns = sizes[shapes[k, 1]], sizes[shapes[k, 2]]
            if shapes[k, 0] == _NUMBER:
                places[k, 0] = rows
            else:
                stride = padded(columns)
                places[k, 0], places[k, 1], places[k, 2] = used, stride, rows * stride
                used += rows * stride
        return used

    return arrange


def opener(table: Table) -> Any:
    """A function for kernels that makes the record of a buffer and of the places in it, which have to outlive it."""

    @intrinsic
    def open_table(_context: Any, buffer: Any, places: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            record = cgutils.create_struct_proxy(table)(context, builder)
            record.numbers = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            record.places = context.make_array(signature.args[1])(context, builder, arguments[1]).data
            return record._getvalue()

        return table(buffer, places), generate

    return open_table


def views(table: Table, name: str, sizes: Any, buffer: Any, places: Any) -> Any:
    """The array of a field without its padding, for Python; ``name`` may lead into a table, as ``here.points``."""
    first = 0
    kind: Field | Table = table
    for part in name.split("."):
        assert isinstance(kind, Table)  # noqa: S101 - names are written in this package
        place, kind = kind.fields[part]
        first += place
    assert isinstance(kind, Field)  # noqa: S101
    start, stride, numbers = places[first]
    return buffer[start : start + numbers].reshape(-1, stride)[:, : sizes[kind.columns]]
