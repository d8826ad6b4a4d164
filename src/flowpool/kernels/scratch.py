"""Memory for the kernels: one buffer for all graphs of a thread, laid out afresh for each graph.

A layout that fits the graph keeps it in the cache, whatever the largest graph of the batch needs.
"""

from __future__ import annotations

from typing import Any

from flowpool.kernels.machine.jit import kernel, shared
from flowpool.kernels.machine.linear import padded
from flowpool.kernels.machine.tables import NUMBER, ROWS, SINGLES, Table, opener

BLOCK = 128  # nodes whose moments are taken at once; the weights of a block stay in the first-level cache


# One graph as the kernels see it: N atoms, R coordinates, of which the first K are leading.
CLOUD = Table(
    "Cloud",
    point_masses=ROWS,  # (1, M)
    masses=ROWS,  # (1, N)
    coordinates=ROWS,  # a row of ones, the R coordinates, then the products of the first K of them, (1 + R + ..., N)
    singles=SINGLES,  # the first 1 + R of these rows in float32
    basis=ROWS,  # (R + M, D)
    parked=ROWS,  # scratch, (M, D)
    outside=ROWS,  # scratch, (M, D)
    row=ROWS,  # scratch, (1, N) or (1, D), whichever is longer
    rest=ROWS,  # scratch: what is left of the nodes while they are rotated, (D, N)
    length=NUMBER,  # N, padded
    single_length=NUMBER,  # N, padded for float32
    hull=NUMBER,  # R
    lead=NUMBER,  # K, coordinates of which the Hessian is formed
    widest=NUMBER,  # how many there is room for
)

# Points and what is known about them.
_PLACE = Table(
    "Place",
    points=ROWS,  # (M, Q)
    gradient=ROWS,  # (M, Q)
    pulled=ROWS,  # P Y, (M, Q)
    potential=ROWS,  # (1, M)
    self_potential=ROWS,  # (1, M)
    rows=ROWS,  # P 1, (1, M)
)

# Where the points of one graph are on their way.
TRACK = Table(
    "Track",
    here=_PLACE,
    there=_PLACE,
    # (M, Q)
    velocity=ROWS,
    first=ROWS,  # k1 of Rosenbrock 2
    newton=ROWS,  # the Newton step
    right=ROWS,
    solution=ROWS,
    # scratch of conjugate gradients
    search=ROWS,
    image=ROWS,
    ready=ROWS,
    rest=ROWS,
)


def _tangent(kind: Any) -> Table:
    """The plan where the Hessian was taken, and how it changes along a direction, in one of two precisions."""
    return Table(
        f"Tangent({kind})",
        conditional=kind,  # A, (M, N)
        plan=kind,  # P, (M, N)
        change=kind,  # dP or dA, (M, N)
        dual=kind,  # dg, (1, N)
        scaled=kind,  # the direction, (M, Q + 1)
    )


# Scratch of the inner problems and the Hessian, with M points, N nodes, Q coordinates, K of them leading, D = M K.
WORK = Table(
    "Work",
    # (M, N)
    gibbs=ROWS,
    conditional=ROWS,  # A
    plan=ROWS,  # P
    # (1, N)
    sums=ROWS,
    old_sums=ROWS,
    # (1, M)
    scaling=ROWS,
    old_scaling=ROWS,
    shift=ROWS,
    trial_shift=ROWS,
    step=ROWS,
    right=ROWS,
    rows=ROWS,
    old_rows=ROWS,
    self_rows=ROWS,
    inverse=ROWS,
    response_inverse=ROWS,
    self_response_inverse=ROWS,
    # (M, M)
    overlap=ROWS,  # P A^T
    small=ROWS,
    self_gibbs=ROWS,
    self_plan=ROWS,  # Q
    kept_self_plan=ROWS,
    self_change=ROWS,  # dQ
    inner=ROWS,  # X W^T
    response=ROWS,
    self_response=ROWS,
    # (M, Q + 1)
    scaled=ROWS,
    # (M (M + 1) / 2, BLOCK)
    pairs=ROWS,  # P_ij A_lj
    # (M (M + 1) / 2, 1 + K + K (K + 1) / 2)
    moments=ROWS,
    block_moments=ROWS,
    # (M, K)
    lead_points=ROWS,
    lead_pulled=ROWS,
    # (1, K)
    mean=ROWS,
    lever=ROWS,
    apart=ROWS,
    # (K, K)
    second=ROWS,
    unit=ROWS,
    # (D, K)
    own_block=ROWS,
    # (2 M, D)
    follow=ROWS,
    weighted_follow=ROWS,
    # (D, D)
    hessian=ROWS,
    factor=ROWS,
    newton_factor=ROWS,
    # (1, D)
    pivots=ROWS,
    newton_pivots=ROWS,
    flat_right=ROWS,
    flat_solution=ROWS,
    double=_tangent(ROWS),
    single=_tangent(SINGLES),
    columns=ROWS,  # X^T, (Q, M)
)

# Where the places of each table begin.
CLOUD_FIRST = 0
TRACK_FIRST = CLOUD_FIRST + CLOUD.places
WORK_FIRST = TRACK_FIRST + TRACK.places
PLACES = WORK_FIRST + WORK.places

open_cloud = opener(CLOUD, CLOUD_FIRST)
open_track = opener(TRACK, TRACK_FIRST)
open_work = opener(WORK, WORK_FIRST)


@shared
def reserve(places, first, fields, used, rows, columns):  # type: ignore[no-untyped-def]
    """Numbers used after giving ``fields`` fields of one shape a place: where each begins, how far its rows are apart."""
    width = padded(columns)
    for k in range(first, first + fields):
        places[k, 0] = used
        places[k, 1] = width
        used += rows * width
    return used


@shared
def single_width(columns):  # type: ignore[no-untyped-def]
    """``columns`` rounded up to a multiple of sixteen, the length of a row of float32 numbers."""
    return 2 * padded((columns + 1) // 2)


@kernel
def to_single(source, row, length, target):  # type: ignore[no-untyped-def]
    """Copies a row as float32 numbers, with zeros up to a multiple of sixteen."""
    for j in range(length):
        target[row, j] = source[row, j]
    for j in range(length, single_width(length)):
        target[row, j] = 0.0


@shared
def place_work(places, used, count, length, dimension, lead):  # type: ignore[no-untyped-def]
    """Numbers used by the fields of ``WORK``."""
    size = count * lead
    pairs = count * (count + 1) // 2
    used = reserve(places, WORK_FIRST, 3, used, count, length)
    used = reserve(places, WORK_FIRST + 3, 2, used, 1, length)
    used = reserve(places, WORK_FIRST + 5, 12, used, 1, count)
    used = reserve(places, WORK_FIRST + 17, 9, used, count, count)
    used = reserve(places, WORK_FIRST + 26, 1, used, count, dimension + 1)
    used = reserve(places, WORK_FIRST + 27, 1, used, pairs, BLOCK)
    used = reserve(places, WORK_FIRST + 28, 2, used, pairs, 1 + lead + lead * (lead + 1) // 2)
    used = reserve(places, WORK_FIRST + 30, 2, used, count, lead)
    used = reserve(places, WORK_FIRST + 32, 3, used, 1, lead)
    used = reserve(places, WORK_FIRST + 35, 2, used, lead, lead)
    used = reserve(places, WORK_FIRST + 37, 1, used, size, lead)
    # A block may be stored past the last column.
    used = reserve(places, WORK_FIRST + 38, 2, used, 2 * count, padded(size) + padded(lead))
    used = reserve(places, WORK_FIRST + 40, 3, used, size + 1, padded(size) + padded(lead))
    used = reserve(places, WORK_FIRST + 43, 4, used, 1, size)
    used = reserve(places, WORK_FIRST + 47, 3, used, count, length)
    used = reserve(places, WORK_FIRST + 50, 1, used, 1, length)
    used = reserve(places, WORK_FIRST + 51, 1, used, count, dimension + 1)
    used = reserve(places, WORK_FIRST + 52, 3, used, count, (length + 1) // 2)
    used = reserve(places, WORK_FIRST + 55, 1, used, 1, (length + 1) // 2)
    used = reserve(places, WORK_FIRST + 56, 1, used, count, dimension // 2 + 1)
    return reserve(places, WORK_FIRST + 57, 1, used, dimension, count)


@shared
def place_track(places, used, count, dimension):  # type: ignore[no-untyped-def]
    """Numbers used by the fields of ``TRACK``: two places and nine sets of vectors."""
    for first in (TRACK_FIRST, TRACK_FIRST + 6):
        used = reserve(places, first, 3, used, count, dimension)
        used = reserve(places, first + 3, 3, used, 1, count)
    return reserve(places, TRACK_FIRST + 12, 9, used, count, dimension)
