"""The nodes of one graph made small: equal nodes merged, coordinates rotated into their hull.

X* lies in the hull of the nodes. Directions of the start that lead out of it are kept as further coordinates of the points,
at most M of them, in which the nodes are zero.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowpool.core.constants import LEADING
from flowpool.kernels.machine.jit import CHECKED, allocating, kernel
from flowpool.kernels.machine.lanes import WIDTH, fma, load, multiply, splat, store, total
from flowpool.kernels.machine.linear import padded
from flowpool.kernels.machine.memory import aligned
from flowpool.kernels.machine.rows import stay_apart
from flowpool.kernels.memory import (
    GRAPH_PLACES,
    SIZES,
    SPAN_PLACES,
    arrange_graph,
    arrange_span,
    open_graph,
    open_span,
    set_graph_sizes,
    set_span_sizes,
)

# Distance from the hull so far, relative to the size of the points, that is no further direction.
START_TOLERANCE = 1e-13
END_TOLERANCE = 1e-9


class Room(NamedTuple):
    """What a thread needs to make any of its graphs small, for up to so many nodes."""

    table: NDArray[np.int64]  # a hash table, empty: all -1
    members: NDArray[np.int64]  # the first node with the features of each atom
    merged: NDArray[np.float64]  # the mass of all such nodes
    atom_of: NDArray[np.int64]  # of each node, counted from the first of its graph
    sizes: NDArray[np.int64]
    span_places: NDArray[np.int64]
    places: NDArray[np.int64]


@allocating
def make_room(most):  # type: ignore[no-untyped-def]
    """Room for graphs of up to ``most`` nodes."""
    size = 1
    while size < 2 * most:
        size *= 2
    return Room(
        np.full(size, -1), np.empty(most, np.int64), np.empty(most), np.empty(most, np.int64),
        np.empty(SIZES, np.int64), np.empty(SPAN_PLACES, np.int64), np.empty(GRAPH_PLACES, np.int64),
    )  # fmt: skip


@allocating
def unfold(  # type: ignore[no-untyped-def]
    nodes, room, atoms, starts, which, point_masses, epsilon, resolution, tolerance, block, first, second
):
    """Buffers for one graph, with its nodes and points in coordinates: those of ``SPAN`` and of ``GRAPH``.

    The buffers given are used again if they are long enough. The points are at ``there``.

    Args:
        nodes: of all graphs, in their frames, ``(N, D)``.
        room, atoms: as :func:`merge_nodes` leaves and gives them.
        starts: points of all graphs, ``(B, M, D)``, of which those of graph ``which`` are taken.
        resolution: distance from the hull, relative to the farthest node with mass, that counts as nothing.
        tolerance: the same for the points.
        block: largest M K for which the Hessian of K directions is formed.
    """
    count, features = starts.shape[1], starts.shape[2]
    members, merged, sizes, span_places, places = room.members, room.merged, room.sizes, room.span_places, room.places
    set_span_sizes(sizes, count, atoms, features)
    numbers = arrange_span(sizes, span_places)
    if numbers > len(first):
        first = aligned(numbers)
    if CHECKED:
        first[:] = math.nan  # so that what is read before it was written shows
    span = open_span(first, span_places)
    hull = rotate_nodes(nodes, features, members, merged, atoms, resolution, span)
    dimension = rotate_points(starts, which, count, features, hull, tolerance, span.basis, span.parked, span.outside)
    length = padded(atoms)
    lead = leading(span.turned, merged, atoms, hull, count, epsilon, block)
    set_graph_sizes(sizes, count, length, hull, dimension, lead)
    numbers = arrange_graph(sizes, places)
    if numbers > len(second):
        second = aligned(numbers)
    if CHECKED:
        second[:] = math.nan
    fill_graph(open_graph(second, places), span, merged, atoms, point_masses)
    return first, second


@kernel
def fill_graph(graph, span, merged, atoms, point_masses):  # type: ignore[no-untyped-def]
    """Fills what does not change while a graph is solved, and the points at ``there``."""
    stay_apart()
    count, length, dimension = graph.count, graph.length, graph.dimension
    for i in range(padded(count)):
        graph.point_masses[0, i] = point_masses[i] if i < count else 0.0
    for j in range(length):
        graph.masses[0, j] = merged[j] if j < atoms else 0.0
    for e in range(1 + graph.hull):
        for j in range(length):
            graph.nodes[e, j] = span.turned[e, j]
    fill_moment_columns(graph.nodes, length, graph.hull, graph.lead)
    for i in range(count):
        for e in range(padded(dimension)):
            graph.there.points[i, e] = span.parked[i, e] if e < dimension else 0.0


@kernel
def leading(turned, masses, atoms, hull, count, epsilon, block):  # type: ignore[no-untyped-def]
    """K, the coordinates of which the Hessian is formed: all if it is small, else those that hold nearly all the variance."""
    stay_apart()
    most = max(1, block // count)
    if hull <= most:
        return hull
    left = 0.0
    for e in range(hull, 0, -1):
        for j in range(atoms):
            left += masses[j] * turned[e, j] * turned[e, j]
        if left > LEADING * epsilon:
            return min(e, most)
    return 1


@kernel
def fill_moment_columns(nodes, length, hull, lead):  # type: ignore[no-untyped-def]
    """Completes the rows ``1, y_1 .. y_R`` of the nodes by the products ``y_e y_c`` with c <= e < K."""
    stay_apart()
    row = 1 + hull
    for e in range(lead):
        for c in range(e + 1):
            for j in range(0, length, WIDTH):
                store(nodes, row, j, multiply(load(nodes, 1 + e, j), load(nodes, 1 + c, j)))
            row += 1


@kernel
def merge_nodes(bits, masses, first, last, with_empty, room):  # type: ignore[no-untyped-def]
    """Number of distinct nodes among ``first .. last``, called atoms, which are noted in the room.

    Args:
        with_empty: whether nodes without mass are atoms, too. They change no solution, but have a gradient in their mass.
        bits: the features as integers, ``(N, D)``, so that equal means equal.
    """
    stay_apart()
    table, members, merged, atom_of = room.table, room.members, room.merged, room.atom_of
    size = 1
    while size < 2 * (last - first):
        size *= 2
    count = 0
    for node in range(first, last):
        if with_empty or masses[node] > 0.0:
            key = 0
            for d in range(bits.shape[1]):
                key = (key ^ bits[node, d]) * 0x5851F42D4C957F2D
                key ^= key >> 29
            slot = key & (size - 1)
            found = -1
            while table[slot] >= 0:
                candidate = members[table[slot]]
                equal = True
                for d in range(bits.shape[1]):
                    if bits[node, d] != bits[candidate, d]:
                        equal = False
                        break
                if equal:
                    found = table[slot]
                    break
                slot = (slot + 1) & (size - 1)
            if found < 0:
                found = count
                table[slot] = count
                members[count] = node
                merged[count] = 0.0
                count += 1
            merged[found] += masses[node]
            atom_of[node - first] = found
    for slot in range(size):
        table[slot] = -1
    return count


@kernel
def next_direction(basis, found, features, squares, tolerance):  # type: ignore[no-untyped-def]
    """Whether the candidate ``basis[found]`` has a part outside the earlier directions; it is then made a unit vector of it."""
    stay_apart()
    end = padded(features)
    for d in range(features, end):
        basis[found, d] = 0.0
    for _ in range(2):  # twice is enough to be orthogonal to rounding
        for p in range(found):
            remove(basis, found, basis, p, end)
    square = 0.0
    for d in range(features):
        square += basis[found, d] * basis[found, d]
    if not square > tolerance * tolerance * squares:
        return False
    scale = splat(1.0 / math.sqrt(square))
    for d in range(0, end, WIDTH):
        store(basis, found, d, multiply(scale, load(basis, found, d)))
    return True


@kernel
def remove(rows, i, basis, p, end):  # type: ignore[no-untyped-def]
    """Coordinate of ``rows[i]`` along the direction ``basis[p]``, which is taken out of the row."""
    inner = splat(0.0)
    for d in range(0, end, WIDTH):
        inner = fma(load(basis, p, d), load(rows, i, d), inner)
    coordinate = total(inner)
    for d in range(0, end, WIDTH):
        store(rows, i, d, fma(splat(-coordinate), load(basis, p, d), load(rows, i, d)))
    return coordinate


@kernel
def rotate_nodes(nodes, features, members, masses, count, tolerance, span):  # type: ignore[no-untyped-def]
    """Dimension of the hull of the nodes that have mass; fills its basis, ``(R, D)``, and ``span.turned``, ``(1 + R, N)``.

    Gram-Schmidt on the nodes, the farthest from the hull so far first. A node without mass has no say in it; of it the
    coordinates along the hull are kept.
    """
    stay_apart()
    basis, rest, turned, squares = span.basis, span.rest, span.turned, span.row
    length = padded(count)
    for d in range(features):
        for j in range(length):
            rest[d, j] = nodes[members[j], d] if j < count else 0.0
    for j in range(0, length, WIDTH):
        square = splat(0.0)
        for d in range(features):
            value = load(rest, d, j)
            square = fma(value, value, square)
        store(squares, 0, j, square)
        store(turned, 0, j, splat(1.0))
    largest = 0.0
    found = 0
    while found < min(features, count):
        farthest = -1
        for j in range(count):
            if masses[j] > 0.0 and (farthest < 0 or squares[0, j] > squares[0, farthest]):
                farthest = j
        if found == 0:
            largest = squares[0, farthest]
        if not squares[0, farthest] > tolerance * tolerance * largest:
            break
        for d in range(features):
            basis[found, d] = rest[d, farthest]
        if not next_direction(basis, found, features, largest, tolerance):
            break
        for j in range(0, length, WIDTH):
            inner = splat(0.0)
            for d in range(features):
                inner = fma(splat(basis[found, d]), load(rest, d, j), inner)
            store(turned, 1 + found, j, inner)
            square = splat(0.0)
            for d in range(features):
                value = fma(splat(-basis[found, d]), inner, load(rest, d, j))
                store(rest, d, j, value)
                square = fma(value, value, square)
            store(squares, 0, j, square)
        found += 1
    return found


@kernel
def rotate_points(start, graph, count, features, hull, tolerance, basis, points, rest):  # type: ignore[no-untyped-def]
    """Coordinates that the points of the start need; fills ``points`` and the rest of the basis."""
    stay_apart()
    largest = 0.0
    for i in range(count):
        for d in range(features):
            rest[i, d] = start[graph, i, d]
            largest = max(largest, abs(rest[i, d]))
        for d in range(features, padded(features)):
            rest[i, d] = 0.0
    largest = largest * largest * features
    found = hull
    for p in range(hull):
        for i in range(count):
            points[i, p] = remove(rest, i, basis, p, padded(features))
    limit = min(features, hull + count)
    for _ in range(count):
        if found >= limit:
            break
        farthest = -1
        best = tolerance * tolerance * largest
        for i in range(count):
            square = 0.0
            for d in range(features):
                square += rest[i, d] * rest[i, d]
            if square > best:
                best = square
                farthest = i
        if farthest < 0:
            break
        for d in range(features):
            basis[found, d] = rest[farthest, d]
        if not next_direction(basis, found, features, largest, tolerance):
            break
        for i in range(count):
            points[i, found] = remove(rest, i, basis, found, padded(features))
        found += 1
    for i in range(count):
        for e in range(found, padded(found)):
            points[i, e] = 0.0
    return found
