"""The memory of the kernels: every declared array has a place of its own, inside the buffer that is asked for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowpool.core.constants import MOST_LEADING
from flowpool.kernels.machine.jit import entry
from flowpool.kernels.machine.linear import padded
from flowpool.kernels.machine.memory import PLACE, Field, Table, aligned, arranger, doubles, number, views
from flowpool.kernels.memory import (
    CLOUD,
    CLOUD_PLACES,
    GRAPH,
    GRAPH_PLACES,
    SIZES,
    arrange_cloud,
    arrange_graph,
    set_cloud_sizes,
    set_graph_sizes,
)

NUMBER = number(0).kind


def fields(table: Table, prefix: str = "") -> dict[str, Field]:
    """All arrays and numbers of a table, also those of the tables in it."""
    found: dict[str, Field] = {}
    for name, (_, kind) in table.fields.items():
        found |= fields(kind, f"{prefix}{name}.") if isinstance(kind, Table) else {prefix + name: kind}
    return found


def check(table: Table, sizes: np.ndarray, places: np.ndarray, numbers: int) -> None:
    """Writes every array through its view, then reads them all: none has touched another, or what is outside."""
    guard = 64
    memory = np.full(numbers + guard, -1.0)
    buffer = memory[:numbers]
    declared = fields(table)
    assert len(declared) == len(places)
    for place, (name, field) in enumerate(declared.items()):
        if field.kind == NUMBER:
            assert places[place, 0] == sizes[field.rows]
            continue
        whole = buffer[places[place, 0] : places[place, 0] + places[place, 2]]
        array = views(table, name, sizes, buffer, places)
        assert array.shape == (sizes[field.rows], sizes[field.columns]), name
        assert places[place, 1] == padded(int(sizes[field.columns]))
        assert len(whole) == sizes[field.rows] * places[place, 1] == places[place, 2]
        assert (whole == -1.0).all(), name
        whole[:] = place
        assert array.base is not None and (array == place).all()
    assert (buffer != -1.0).all()  # nothing is asked for that no array has
    assert (memory[numbers:] == -1.0).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(count=st.integers(1, 40), atoms=st.integers(1, 200), features=st.integers(1, 80), data=st.data())
def test_every_array_has_a_place_of_its_own(count: int, atoms: int, features: int, data: st.DataObject) -> None:
    sizes, places = np.full(SIZES, -(10**6)), np.empty(CLOUD_PLACES, np.int64)
    set_cloud_sizes(sizes, count, atoms, features)
    check(CLOUD, sizes, places, arrange_cloud(sizes, places))
    hull = data.draw(st.integers(1, min(atoms, features)))
    dimension = data.draw(st.integers(hull, min(features, hull + count)))
    lead = data.draw(st.integers(1, min(hull, max(1, MOST_LEADING // count))))
    places = np.empty(GRAPH_PLACES, np.int64)
    set_graph_sizes(sizes, count, padded(atoms), hull, dimension, lead)
    check(GRAPH, sizes, places, arrange_graph(sizes, places))


# Shapes whose memory was once too small: centred nodes of rank N - 1 with (N - 1) M = 512, and hulls below the bound.
@pytest.mark.parametrize(("count", "features", "atoms", "hull"), [(32, 32, 17, 16), (64, 64, 9, 8), (4, 256, 400, 128)])
def test_shapes_that_once_overflowed_have_room(count: int, features: int, atoms: int, hull: int) -> None:
    sizes, places = np.full(SIZES, -(10**6)), np.empty(GRAPH_PLACES, np.int64)
    lead = min(hull, max(1, MOST_LEADING // count))
    set_graph_sizes(sizes, count, padded(atoms), hull, min(features, hull + count), lead)
    numbers = arrange_graph(sizes, places)
    check(GRAPH, sizes, places, numbers)
    assert views(GRAPH, "nodes", sizes, np.zeros(numbers), places).shape[0] == 1 + hull
    assert views(GRAPH, "hessian", sizes, np.zeros(numbers), places).shape[0] >= count * lead


def test_a_table_in_a_table_is_laid_out_with_it() -> None:
    inner = Table("TestInner", row=doubles(0, 1), other=doubles(0, 0))
    outer = Table("TestOuter", first=inner, size=number(1), last=doubles(1, 1), second=inner)
    sizes, places = np.array([3, 9]), np.zeros((6, PLACE), np.int64)
    numbers = arranger(outer)(sizes, places)
    check(outer, sizes, places, numbers)
    assert numbers == 2 * (3 * 16 + 3 * 8) + 9 * 16
    buffer = np.arange(float(numbers))
    assert views(outer, "second.row", sizes, buffer, places)[0, 0] == 3 * 16 + 3 * 8 + 9 * 16


@entry
def aligned_inside(numbers):  # type: ignore[no-untyped-def]
    return aligned(numbers)


def test_buffers_begin_with_a_line_of_the_cache() -> None:
    kept = []
    for numbers in range(1, 200):
        for made in (aligned(numbers), aligned_inside(numbers)):
            assert len(made) == numbers and made.ctypes.data % 64 == 0
            made[:] = numbers
            kept.append(made)
    for place, made in enumerate(kept):  # nobody wrote into another's
        assert (made == 1 + place // 2).all()
