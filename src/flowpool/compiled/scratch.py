"""Memory for the kernels: one buffer for all graphs of a thread, laid out afresh for each graph.

A layout that fits the graph keeps it in the cache, whatever the largest graph of the batch needs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flowpool.compiled.flow import Place, Track
from flowpool.compiled.jit import kernel, shared
from flowpool.compiled.linear import padded
from flowpool.compiled.rows import part, singles, stay_apart

BLOCK = 128  # nodes whose moments are taken at once; the weights of a block stay in the first-level cache


class Tangent(NamedTuple):
    """The plan where the Hessian was taken, and how it changes along a direction, in one of two precisions."""

    conditional: Any  # A, (M, N)
    plan: Any  # P, (M, N)
    change: Any  # dP or dA, (M, N)
    dual: Any  # dg, (1, N)
    scaled: Any  # the direction, (M, Q + 1)


class Work(NamedTuple):
    """Scratch of the inner problems and the Hessian, with M points, N nodes, Q coordinates, K of them leading, D = M K."""

    # (M, N)
    gibbs: Any
    conditional: Any  # A
    plan: Any  # P
    # (1, N)
    sums: Any
    old_sums: Any
    # (1, M)
    scaling: Any
    old_scaling: Any
    shift: Any
    trial_shift: Any
    step: Any
    right: Any
    rows: Any
    old_rows: Any
    self_rows: Any
    inverse: Any
    response_inverse: Any
    self_response_inverse: Any
    # (M, M)
    overlap: Any  # P A^T
    small: Any
    self_gibbs: Any
    self_plan: Any  # Q
    kept_self_plan: Any
    self_change: Any  # dQ
    inner: Any  # X W^T
    response: Any
    self_response: Any
    # (M, Q + 1)
    scaled: Any
    # (M (M + 1) / 2, BLOCK)
    pairs: Any  # P_ij A_lj
    # (M (M + 1) / 2, 1 + K + K (K + 1) / 2)
    moments: Any
    block_moments: Any
    # (M, K)
    lead_points: Any
    lead_pulled: Any
    # (1, K)
    mean: Any
    lever: Any
    apart: Any
    # (K, K)
    second: Any
    unit: Any
    # (D, K)
    own_block: Any
    # (2 M, D)
    follow: Any
    weighted_follow: Any
    # (D, D)
    hessian: Any
    factor: Any
    newton_factor: Any
    # (1, D)
    pivots: Any
    newton_pivots: Any
    flat_right: Any
    flat_solution: Any
    double: Tangent
    single: Tangent


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
    """Numbers used by the fields of :class:`Work`."""
    size = count * lead
    pairs = count * (count + 1) // 2
    used = reserve(places, 0, 3, used, count, length)
    used = reserve(places, 3, 2, used, 1, length)
    used = reserve(places, 5, 12, used, 1, count)
    used = reserve(places, 17, 9, used, count, count)
    used = reserve(places, 26, 1, used, count, dimension + 1)
    used = reserve(places, 27, 1, used, pairs, BLOCK)
    used = reserve(places, 28, 2, used, pairs, 1 + lead + lead * (lead + 1) // 2)
    used = reserve(places, 30, 2, used, count, lead)
    used = reserve(places, 32, 3, used, 1, lead)
    used = reserve(places, 35, 2, used, lead, lead)
    used = reserve(places, 37, 1, used, size, lead)
    # A block may be stored past the last column.
    used = reserve(places, 38, 2, used, 2 * count, padded(size) + padded(lead))
    used = reserve(places, 40, 3, used, size + 1, padded(size) + padded(lead))
    used = reserve(places, 43, 4, used, 1, size)
    used = reserve(places, 47, 3, used, count, length)
    used = reserve(places, 50, 1, used, 1, length)
    used = reserve(places, 51, 1, used, count, dimension + 1)
    used = reserve(places, 52, 3, used, count, (length + 1) // 2)
    used = reserve(places, 55, 1, used, 1, (length + 1) // 2)
    return reserve(places, 56, 1, used, count, dimension // 2 + 1)


@shared
def place_track(places, used, count, dimension):  # type: ignore[no-untyped-def]
    """Numbers used by the fields of :class:`Track`: two places and nine sets of vectors."""
    for first in (0, 6):
        used = reserve(places, first, 3, used, count, dimension)
        used = reserve(places, first + 3, 3, used, 1, count)
    return reserve(places, 12, 9, used, count, dimension)


@kernel
def make_work(buffer, places):  # type: ignore[no-untyped-def]
    """The scratch that :func:`place_work` has placed."""
    stay_apart()
    return Work(
        part(buffer, places[0, 0], places[0, 1]),
        part(buffer, places[1, 0], places[1, 1]),
        part(buffer, places[2, 0], places[2, 1]),
        part(buffer, places[3, 0], places[3, 1]),
        part(buffer, places[4, 0], places[4, 1]),
        part(buffer, places[5, 0], places[5, 1]),
        part(buffer, places[6, 0], places[6, 1]),
        part(buffer, places[7, 0], places[7, 1]),
        part(buffer, places[8, 0], places[8, 1]),
        part(buffer, places[9, 0], places[9, 1]),
        part(buffer, places[10, 0], places[10, 1]),
        part(buffer, places[11, 0], places[11, 1]),
        part(buffer, places[12, 0], places[12, 1]),
        part(buffer, places[13, 0], places[13, 1]),
        part(buffer, places[14, 0], places[14, 1]),
        part(buffer, places[15, 0], places[15, 1]),
        part(buffer, places[16, 0], places[16, 1]),
        part(buffer, places[17, 0], places[17, 1]),
        part(buffer, places[18, 0], places[18, 1]),
        part(buffer, places[19, 0], places[19, 1]),
        part(buffer, places[20, 0], places[20, 1]),
        part(buffer, places[21, 0], places[21, 1]),
        part(buffer, places[22, 0], places[22, 1]),
        part(buffer, places[23, 0], places[23, 1]),
        part(buffer, places[24, 0], places[24, 1]),
        part(buffer, places[25, 0], places[25, 1]),
        part(buffer, places[26, 0], places[26, 1]),
        part(buffer, places[27, 0], places[27, 1]),
        part(buffer, places[28, 0], places[28, 1]),
        part(buffer, places[29, 0], places[29, 1]),
        part(buffer, places[30, 0], places[30, 1]),
        part(buffer, places[31, 0], places[31, 1]),
        part(buffer, places[32, 0], places[32, 1]),
        part(buffer, places[33, 0], places[33, 1]),
        part(buffer, places[34, 0], places[34, 1]),
        part(buffer, places[35, 0], places[35, 1]),
        part(buffer, places[36, 0], places[36, 1]),
        part(buffer, places[37, 0], places[37, 1]),
        part(buffer, places[38, 0], places[38, 1]),
        part(buffer, places[39, 0], places[39, 1]),
        part(buffer, places[40, 0], places[40, 1]),
        part(buffer, places[41, 0], places[41, 1]),
        part(buffer, places[42, 0], places[42, 1]),
        part(buffer, places[43, 0], places[43, 1]),
        part(buffer, places[44, 0], places[44, 1]),
        part(buffer, places[45, 0], places[45, 1]),
        part(buffer, places[46, 0], places[46, 1]),
        Tangent(
            part(buffer, places[47, 0], places[47, 1]),
            part(buffer, places[48, 0], places[48, 1]),
            part(buffer, places[49, 0], places[49, 1]),
            part(buffer, places[50, 0], places[50, 1]),
            part(buffer, places[51, 0], places[51, 1]),
        ),
        Tangent(
            singles(buffer, places[52, 0], 2 * places[52, 1]),
            singles(buffer, places[53, 0], 2 * places[53, 1]),
            singles(buffer, places[54, 0], 2 * places[54, 1]),
            singles(buffer, places[55, 0], 2 * places[55, 1]),
            singles(buffer, places[56, 0], 2 * places[56, 1]),
        ),
    )


@kernel
def make_track(buffer, places):  # type: ignore[no-untyped-def]
    """The track that :func:`place_track` has placed."""
    stay_apart()
    here = Place(
        part(buffer, places[0, 0], places[0, 1]),
        part(buffer, places[1, 0], places[1, 1]),
        part(buffer, places[2, 0], places[2, 1]),
        part(buffer, places[3, 0], places[3, 1]),
        part(buffer, places[4, 0], places[4, 1]),
        part(buffer, places[5, 0], places[5, 1]),
    )
    there = Place(
        part(buffer, places[6, 0], places[6, 1]),
        part(buffer, places[7, 0], places[7, 1]),
        part(buffer, places[8, 0], places[8, 1]),
        part(buffer, places[9, 0], places[9, 1]),
        part(buffer, places[10, 0], places[10, 1]),
        part(buffer, places[11, 0], places[11, 1]),
    )
    return Track(
        here,
        there,
        part(buffer, places[12, 0], places[12, 1]),
        part(buffer, places[13, 0], places[13, 1]),
        part(buffer, places[14, 0], places[14, 1]),
        part(buffer, places[15, 0], places[15, 1]),
        part(buffer, places[16, 0], places[16, 1]),
        part(buffer, places[17, 0], places[17, 1]),
        part(buffer, places[18, 0], places[18, 1]),
        part(buffer, places[19, 0], places[19, 1]),
        part(buffer, places[20, 0], places[20, 1]),
    )
