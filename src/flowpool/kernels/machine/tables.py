"""Records of rows that are passed on as two words.

The arrays of a graph lie one behind the other in one buffer, and a table of places says where each begins and how far its
rows are apart. A :class:`Table` gives them names: ``work.gibbs`` in a kernel reads the place of ``gibbs`` and is the rows
there. Handing each array on by itself would fill the stack at every call, and the compiler's time with it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, models, register_model

from flowpool.kernels.machine.rows import make_rows, rows_type, singles_type

ROWS, SINGLES, NUMBER = rows_type, singles_type, types.intp
_NUMBERS, _PLACES = types.CPointer(types.float64), types.CPointer(types.intp)


class Table(types.Type):
    """Type of a record whose fields are float64 rows, float32 rows, numbers, or tables again.

    Attributes:
        fields: the place and the type of each field.
        places: how many places there are.
    """

    def __init__(self, name: str, **fields: Any) -> None:
        self.fields: dict[str, tuple[int, Any]] = {}
        self.places = 0
        for field, kind in fields.items():
            self.fields[field] = self.places, kind
            self.places += kind.places if isinstance(kind, Table) else 1
        super().__init__(name=f"flowpool.{name}")


@register_model(Table)
class _TableModel(models.StructModel):
    def __init__(self, manager: Any, frontend_type: Any) -> None:
        super().__init__(manager, frontend_type, [("numbers", _NUMBERS), ("places", _PLACES)])


@infer_getattr
class _Fields(AttributeTemplate):
    key = Table

    def generic_resolve(self, table: Table, name: str) -> Any:
        return table.fields[name][1] if name in table.fields else None


def _at(builder: Any, places: Any, index: int) -> Any:
    return builder.gep(places, [ir.Constant(ir.IntType(64), index)])


@lower_getattr_generic(Table)
def _field(context: Any, builder: Any, table: Table, value: Any, name: str) -> Any:
    whole = cgutils.create_struct_proxy(table)(context, builder, value=value)
    place, kind = table.fields[name]
    if isinstance(kind, Table):
        part = cgutils.create_struct_proxy(kind)(context, builder)
        part.numbers, part.places = whole.numbers, _at(builder, whole.places, 2 * place)
        return part._getvalue()
    first = builder.load(_at(builder, whole.places, 2 * place))
    if kind is NUMBER:
        return first
    data, stride = builder.gep(whole.numbers, [first]), builder.load(_at(builder, whole.places, 2 * place + 1))
    if kind is SINGLES:
        data = builder.bitcast(data, ir.FloatType().as_pointer())
        stride = builder.add(stride, stride)
    return make_rows(context, builder, data, stride, kind)


def opener(table: Table, first: int) -> Any:
    """A function for kernels that makes the record of a buffer and of an array of places, whose own begin at ``first``.

    The buffer and the places have to outlive it.
    """

    @intrinsic
    def open_table(_context: Any, buffer: Any, places: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            numbers = cgutils.create_struct_proxy(buffer)(context, builder, value=arguments[0]).data
            array = context.make_array(signature.args[1])(context, builder, arguments[1])
            record = cgutils.create_struct_proxy(table)(context, builder)
            record.numbers, record.places = numbers, _at(builder, array.data, 2 * first)
            return record._getvalue()

        return table(buffer, places), generate

    return open_table
