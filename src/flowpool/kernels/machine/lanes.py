"""Eight numbers at a time: a vector type for Numba, so that short loops over nodes become vector instructions.

Numba leaves vectorisation to heuristics that spend more time on overlap checks and remainders than on loops of
length 16. Here a kernel says what it wants: :func:`load` takes eight neighbouring entries of a row, arithmetic works on
all of them, :func:`store` puts them back. Rows are padded to a multiple of eight. The code is lowered to whatever vector
registers the machine has.

None of the operations may assume the absence of NaN or infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from flowpool.kernels.machine.jit import kernel
from flowpool.kernels.machine.rows import item_pointer

WIDTH = 8

_DOUBLE = ir.DoubleType()
_VECTOR = ir.VectorType(_DOUBLE, WIDTH)
_INTEGERS = ir.VectorType(ir.IntType(64), WIDTH)


class Lanes(types.Type):
    """Type of eight float64 numbers held in registers."""


lanes = Lanes("flowpool.Lanes")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, frontend_type: Any) -> None:
        super().__init__(manager, frontend_type, _VECTOR)


@intrinsic
def load(_context: Any, rows: Any, row: Any, column: Any) -> Any:
    """``rows[row, column:column + 8]``."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        start = item_pointer(context, builder, arguments[0], arguments[1], arguments[2], WIDTH)
        pointer = builder.bitcast(start, _VECTOR.as_pointer())
        return builder.load(pointer, align=8)

    return lanes(rows, types.intp, types.intp), generate


@intrinsic
def store(_context: Any, rows: Any, row: Any, column: Any, value: Any) -> Any:
    """``rows[row, column:column + 8] = value``."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        start = item_pointer(context, builder, arguments[0], arguments[1], arguments[2], WIDTH)
        pointer = builder.bitcast(start, _VECTOR.as_pointer())
        builder.store(arguments[3], pointer, align=8)
        return context.get_dummy_value()

    return types.void(rows, types.intp, types.intp, lanes), generate


def _splat(builder: Any, scalar: Any, vector: Any) -> Any:
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), mask)


@intrinsic
def splat(_context: Any, scalar: Any) -> Any:
    """Eight copies of a number."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return _splat(builder, arguments[0], _VECTOR)

    return lanes(types.float64), generate


def _elementwise(operation: Callable[..., Any], count: int, doc: str) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return operation(builder, *arguments)

    def binary(_context: Any, first: Any, second: Any) -> Any:
        return lanes(lanes, lanes), generate

    def ternary(_context: Any, first: Any, second: Any, third: Any) -> Any:
        return lanes(lanes, lanes, lanes), generate

    typed = binary if count == 2 else ternary
    typed.__doc__ = doc
    return intrinsic(typed)


def _fused(builder: Any, first: Any, second: Any, third: Any) -> Any:
    # fmuladd, not fma: a machine without the fused instruction then multiplies and adds instead of calling a library.
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fmuladd.v{WIDTH}f64")
    return builder.call(function, [first, second, third])


def _larger(builder: Any, first: Any, second: Any) -> Any:
    # A comparison with a NaN is false, so a NaN in the first argument is lost and one in the second is kept.
    return builder.select(builder.fcmp_ordered(">", first, second), first, second)


add = _elementwise(lambda builder, x, y: builder.fadd(x, y), 2, "x + y")
subtract = _elementwise(lambda builder, x, y: builder.fsub(x, y), 2, "x - y")
multiply = _elementwise(lambda builder, x, y: builder.fmul(x, y), 2, "x y")
divide = _elementwise(lambda builder, x, y: builder.fdiv(x, y), 2, "x / y")
larger = _elementwise(_larger, 2, "x where x > y, else y")
fma = _elementwise(_fused, 3, "x y + z")


@intrinsic
def total(_context: Any, value: Any) -> Any:
    """Sum of the eight numbers."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        current, width = arguments[0], WIDTH
        while width > 1:  # halves are added, so the order of the sum is fixed
            width //= 2
            halves = []
            for start in (0, width):
                mask = ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(start, start + width)))
                halves.append(builder.shuffle_vector(current, ir.Constant(current.type, ir.Undefined), mask))
            current = builder.fadd(*halves)
        return builder.extract_element(current, ir.Constant(ir.IntType(32), 0))

    return types.float64(lanes), generate


@intrinsic
def _power_of_two(_context: Any, shifted: Any) -> Any:
    """``2^k`` from the bits of ``k + 1.5 * 2^52``, whose last digits are the integer k."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], _INTEGERS)
        bias = _splat(builder, ir.Constant(ir.IntType(64), 1023), _INTEGERS)
        shift = _splat(builder, ir.Constant(ir.IntType(64), 52), _INTEGERS)
        return builder.bitcast(builder.shl(builder.add(bits, bias), shift), _VECTOR)

    return lanes(lanes), generate


@kernel
def exponential(x):  # type: ignore[no-untyped-def]
    """``exp`` of eight numbers <= 700, to one rounding error; what is below -700 gives about 1e-304, not less.

    ``x = k log 2 + z`` with ``|z| <= log(2) / 2``; a Taylor polynomial of degree 13 for z, k by way of the exponent bits.
    """
    x = larger(splat(-700.0), x)  # in this order a NaN stays a NaN
    shifted = fma(x, splat(1.4426950408889634), splat(6755399441055744.0))
    k = subtract(shifted, splat(6755399441055744.0))
    z = fma(k, splat(-6.93147180369123816490e-01), x)
    z = fma(k, splat(-1.90821492927058770002e-10), z)
    # Two halves in powers of z^2 shorten the chain of dependent products.
    square = multiply(z, z)
    even = fma(square, splat(1 / 479001600), splat(1 / 3628800))
    odd = fma(square, splat(1 / 6227020800), splat(1 / 39916800))
    even = fma(square, even, splat(1 / 40320))
    odd = fma(square, odd, splat(1 / 362880))
    even = fma(square, even, splat(1 / 720))
    odd = fma(square, odd, splat(1 / 5040))
    even = fma(square, even, splat(1 / 24))
    odd = fma(square, odd, splat(1 / 120))
    even = fma(square, even, splat(1 / 2))
    odd = fma(square, odd, splat(1 / 6))
    even = fma(square, even, splat(1.0))
    odd = fma(square, odd, splat(1.0))
    return multiply(fma(z, odd, even), _power_of_two(shifted))
