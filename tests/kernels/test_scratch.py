"""The layout of the kernels' memory: every declared array has a place of its own."""

import numpy as np
import pytest

from flowpool.kernels.cloud import place_cloud
from flowpool.kernels.machine.tables import NUMBER, Table
from flowpool.kernels.scratch import (
    CLOUD,
    CLOUD_FIRST,
    PLACES,
    TRACK,
    TRACK_FIRST,
    WORK,
    WORK_FIRST,
    place_track,
    place_work,
)


def arrays(table: Table, first: int) -> list[int]:
    """Places of the arrays of a table and of the tables in it."""
    found = []
    for place, kind in table.fields.values():
        if isinstance(kind, Table):
            found += arrays(kind, first + place)
        elif kind is not NUMBER:
            found.append(first + place)
    return found


@pytest.mark.parametrize(("count", "features", "length", "hull"), [(5, 8, 24, 3), (16, 32, 320, 28), (1, 1, 8, 1)])
def test_every_array_has_a_place_of_its_own(count, features, length, hull):
    places = np.full((PLACES, 2), -1)
    dimension = min(features, hull + count)
    used = place_cloud(places, 0, count, features, length, hull, dimension)
    used = place_track(places, used, count, dimension)
    used = place_work(places, used, count, length, dimension, hull)
    expected = arrays(CLOUD, CLOUD_FIRST) + arrays(TRACK, TRACK_FIRST) + arrays(WORK, WORK_FIRST)
    assert sorted(expected) == np.flatnonzero(places[:, 0] >= 0).tolist()
    starts = np.sort(places[expected, 0])
    assert len(np.unique(starts)) == len(starts)
    assert starts[-1] < used


def test_shapes_stand_where_the_names_say():
    count, length, dimension, lead = 5, 24, 8, 3
    places = np.full((PLACES, 2), -1)
    place_work(places, 0, count, length, dimension, lead)
    at = {name: places[WORK_FIRST + place] for name, (place, _) in WORK.fields.items()}
    following = {name: places[WORK_FIRST + place + 1, 0] - at[name][0] for name, (place, _) in WORK.fields.items()
                 if WORK_FIRST + place + 1 < PLACES}  # fmt: skip
    for name, rows, width in (
        ("gibbs", count, 24), ("sums", 1, 24), ("scaling", 1, 8), ("self_plan", count, 8), ("scaled", count, 16),
        ("pairs", 15, 128), ("lead_points", count, 8), ("second", lead, 8), ("own_block", 15, 8), ("pivots", 1, 16),
    ):  # fmt: skip
        assert at[name][1] == width, name
        assert following[name] == rows * width, name
