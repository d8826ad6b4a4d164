"""Kernels that reach outside of their arrays; prints which of them were stopped, and that what is inside is not."""

from __future__ import annotations

import numpy as np

from flowpool.kernels.machine.jit import CHECKED, entry
from flowpool.kernels.machine.lanes import load, splat, store
from flowpool.kernels.machine.memory import PLACE, Table, arranger, doubles, opener
from flowpool.kernels.machine.rows import rows_of

PAIR = Table("OutsidePair", first=doubles(0, 1), last=doubles(0, 1))
arrange, open_pair = arranger(PAIR), opener(PAIR)


@entry
def read(values, row, column):  # type: ignore[no-untyped-def]
    return rows_of(values)[row, column]


@entry
def write(values, row, column):  # type: ignore[no-untyped-def]
    rows_of(values)[row, column] = 1.0


@entry
def lane(values, row, column):  # type: ignore[no-untyped-def]
    rows = rows_of(values)
    store(rows, row, column, splat(2.0))
    store(rows, row, column, load(rows, row, column))


@entry
def table(numbers, places, row, column):  # type: ignore[no-untyped-def]
    """Outside of the first array, though still inside the buffer."""
    open_pair(numbers, places).first[row, column] = 1.0


def stopped(kernel, *arguments) -> bool:  # type: ignore[no-untyped-def]
    try:
        kernel(*arguments)
    except IndexError:
        return True
    return False


def main() -> None:
    assert CHECKED
    values = np.zeros((3, 8))
    sizes, places = np.array([2, 8]), np.zeros((2, PLACE), np.int64)
    numbers = np.zeros(arrange(sizes, places))
    if stopped(read, values, 3, 0) and stopped(read, values, 0, -1) and stopped(read, values, 2, 8):
        print("read")
    if stopped(write, values, 3, 0) and stopped(write, values, -1, 0):
        print("write")
    if stopped(lane, values, 2, 1) and stopped(lane, values, 3, 0):
        print("lane")
    if stopped(table, numbers, places, 2, 0) and stopped(table, numbers, places, 0, -1):
        print("table")
    assert not values.any() and not numbers.any(), "something was written before it was stopped"
    inside = (
        not stopped(read, values, 2, 7), not stopped(write, values, 2, 7), not stopped(lane, values, 2, 0),
        not stopped(table, numbers, places, 1, 7),
    )  # fmt: skip
    if all(inside):
        print("inside")


if __name__ == "__main__":
    main()
