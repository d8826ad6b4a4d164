"""The nodes of one graph made small: equal nodes merged, coordinates along the directions that they span.

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
from flowpool.kernels.machine.rows import part, rows_of, stay_apart
from flowpool.kernels.memory import (
    CLOUD_PLACES,
    GRAPH_PLACES,
    SIZES,
    arrange_cloud,
    arrange_graph,
    open_graph,
    set_cloud_sizes,
    set_graph_sizes,
)
from flowpool.kernels.records import DIMENSION, DISTINCT, HEAVY, HULL

# Distance of the points from the hull so far, relative to their size, that is no further direction.
START_TOLERANCE = 1e-13
END_TOLERANCE = 1e-9


class Room(NamedTuple):
    """What a thread needs for any of its graphs, of up to so many nodes."""

    direction: NDArray[np.float64]  # along which nodes are sorted, (D,)
    keys: NDArray[np.float64]
    ranks: NDArray[np.int64]
    spare: NDArray[np.int64]
    members: NDArray[np.int64]  # the first place of each distinct node, counted from that of its graph
    total: NDArray[np.float64]  # sums of gradients, (D,),
    moment: NDArray[np.float64]  # (D,)
    push: NDArray[np.float64]  # and what they make of the frame, (4, D)
    sizes: NDArray[np.int64]
    cloud_places: NDArray[np.int64]
    graph_places: NDArray[np.int64]


@allocating
def make_room(most, features):  # type: ignore[no-untyped-def]
    """Room for graphs of up to ``most`` nodes."""
    return Room(
        np.cos(np.arange(1.0, features + 1.0)), np.empty(most), np.empty(most, np.int64), np.empty(most, np.int64),
        np.empty(most, np.int64), np.empty(features), np.empty(features), np.empty((4, features)),
        np.empty(SIZES, np.int64), np.empty(CLOUD_PLACES, np.int64), np.empty(GRAPH_PLACES, np.int64),
    )  # fmt: skip


@kernel
def merge_nodes(given, kept, which, room):  # type: ignore[no-untyped-def]
    """Numbers the distinct nodes of a graph, and notes the first member of each."""
    stay_apart()
    nodes, order, distinct, members, ranks = given.nodes, kept.order, kept.distinct, room.members, room.ranks
    first, size, keys, rank = given.ptr[which], given.ptr[which + 1] - given.ptr[which], room.keys, room.spare
    count, run = 0, 0  # distinct nodes, and the first of those with the same key
    for k in range(size):
        node = order[first + k]
        if k > 0 and keys[ranks[k]] != keys[ranks[k - 1]]:
            run = count
        number = count
        for candidate in range(run, count):
            other, equal = order[first + members[candidate]], True
            for d in range(nodes.shape[1]):
                if nodes[node, d] != nodes[other, d]:
                    equal = False
                    break
            if equal:
                number = candidate
                break
        if number == count:
            members[count], rank[count] = k, 0
            count += 1
        distinct[first + k] = number
        if kept.masses[first + k] > 0.0:
            rank[number] = 1
    # Those without mass go to the end: they change no solution, but have a gradient in their mass.
    heavy = 0
    for number in range(count):
        heavy += rank[number]
    light, weighty = heavy, 0
    for number in range(count):
        if rank[number] > 0:
            rank[number] = weighty
            weighty += 1
        else:
            rank[number] = light
            light += 1
    for k in range(size - 1, -1, -1):
        number = rank[distinct[first + k]]
        distinct[first + k] = number
        members[number] = k
    kept.facts[which, HEAVY], kept.facts[which, DISTINCT] = heavy, count


@allocating
def cloud_memory(given, kept, which, room, buffer):  # type: ignore[no-untyped-def]
    """A buffer for the arrays of ``CLOUD``; the one given if it is long enough."""
    set_cloud_sizes(room.sizes, len(given.point_masses), int(kept.facts[which, DISTINCT]), given.nodes.shape[1])
    numbers = arrange_cloud(room.sizes, room.cloud_places)
    if numbers > len(buffer):
        buffer = aligned(numbers)
    if CHECKED:
        buffer[:] = math.nan  # so that what is read before it was written shows
    return buffer


@allocating
def graph_memory(given, kept, which, room, epsilon, taken, dimension, block, buffer):  # type: ignore[no-untyped-def]
    """A buffer for the arrays of ``GRAPH``, with the nodes of a graph; the one given if it is long enough.

    Args:
        taken: so many of the distinct nodes: those with mass, or all.
        dimension: Q, coordinates of the points.
        block: largest M K for which the Hessian of K directions is formed.
    """
    hull = int(kept.facts[which, HULL])
    count = len(given.point_masses)
    lead = leading(given, kept, which, epsilon, max(1, block // count))
    set_graph_sizes(room.sizes, count, padded(taken), hull, dimension, lead)
    numbers = arrange_graph(room.sizes, room.graph_places)
    if numbers > len(buffer):
        buffer = aligned(numbers)
    if CHECKED:
        buffer[:] = math.nan
    fill_graph(given, kept, which, taken, open_graph(buffer, room.graph_places))
    return buffer


@kernel
def fill_graph(given, kept, which, taken, graph):  # type: ignore[no-untyped-def]
    """Fills what does not change while a graph is solved."""
    stay_apart()
    first, last = given.ptr[which], given.ptr[which + 1]
    for i in range(padded(graph.count)):
        graph.point_masses[0, i] = given.point_masses[i] if i < graph.count else 0.0
    for j in range(graph.length):
        graph.masses[0, j], graph.nodes[0, j] = 0.0, 1.0
        for e in range(graph.hull):
            graph.nodes[1 + e, j] = kept.coordinates[first + j, e] if j < taken else 0.0
    for place in range(first, last):
        if kept.distinct[place] < taken:
            graph.masses[0, kept.distinct[place]] += kept.masses[place]


@kernel
def leading(given, kept, which, epsilon, most):  # type: ignore[no-untyped-def]
    """K, the coordinates of which the Hessian is formed: all if it is small, else those that hold nearly all the variance."""
    stay_apart()
    hull, left = int(kept.facts[which, HULL]), 0.0
    if hull <= most:
        return hull
    for e in range(hull - 1, -1, -1):
        for place in range(given.ptr[which], given.ptr[which + 1]):
            along = kept.coordinates[given.ptr[which] + kept.distinct[place], e]
            left += kept.masses[place] * along * along
        if left > LEADING * epsilon:
            return min(e + 1, most)
    return 1


@kernel
def basis_of(kept, which, given):  # type: ignore[no-untyped-def]
    """The rows of the basis of a graph."""
    rows, width = rows_of(kept.basis), kept.basis.shape[1]
    return part(rows, (given.ptr[which] + which * len(given.point_masses)) * width, width)


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
def reduce_to_hull(given, kept, which, room, cloud):  # type: ignore[no-untyped-def]
    """Finds the directions that the nodes with mass span, and the coordinates of all distinct nodes along them.

    Gram-Schmidt on the nodes, the farthest from the hull so far first. A node without mass has no say in it; of it the
    coordinates along the hull are kept.
    """
    stay_apart()
    nodes, order, first, features = given.nodes, kept.order, given.ptr[which], given.nodes.shape[1]
    heavy, count = int(kept.facts[which, HEAVY]), int(kept.facts[which, DISTINCT])
    mean, scale, basis = kept.frame[which, 0], kept.frame[which, 1], basis_of(kept, which, given)
    rest, squares, along, length = cloud.left, cloud.row, cloud.along, padded(count)
    tolerance = given.resolution
    for d in range(features):
        for j in range(length):
            rest[d, j] = (nodes[order[first + room.members[j]], d] - mean[d]) / scale[d] if j < count else 0.0
    for j in range(0, length, WIDTH):
        square = splat(0.0)
        for d in range(features):
            value = load(rest, d, j)
            square = fma(value, value, square)
        store(squares, 0, j, square)
    largest, found = 0.0, 0
    while found < min(features, heavy):
        farthest = 0
        for j in range(heavy):
            if squares[0, j] > squares[0, farthest]:
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
            store(along, 0, j, inner)
            square = splat(0.0)
            for d in range(features):
                value = fma(splat(-basis[found, d]), inner, load(rest, d, j))
                store(rest, d, j, value)
                square = fma(value, value, square)
            store(squares, 0, j, square)
        for j in range(count):
            kept.coordinates[first + j, found] = along[0, j]
        found += 1
    kept.facts[which, HULL] = found


@kernel
def reduce_start(given, kept, which, cloud):  # type: ignore[no-untyped-def]
    """Fills ``cloud.points`` with the coordinates of the start ``cloud.outside``, for which the basis is made longer."""
    stay_apart()
    points, rest, features = cloud.points, cloud.outside, given.nodes.shape[1]
    count, width, basis = len(given.point_masses), padded(features), basis_of(kept, which, given)
    largest, found = 0.0, int(kept.facts[which, HULL])
    for i in range(count):
        for d in range(features):
            largest = max(largest, abs(rest[i, d]))
    largest = largest * largest * features
    limit = min(features, found + count)
    for p in range(found):
        for i in range(count):
            points[i, p] = remove(rest, i, basis, p, width)
    while found < limit:
        farthest = -1
        best = START_TOLERANCE * START_TOLERANCE * largest
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
        if not next_direction(basis, found, features, largest, START_TOLERANCE):
            break
        for i in range(count):
            points[i, found] = remove(rest, i, basis, found, width)
        found += 1
    kept.facts[which, DIMENSION] = found


@kernel
def dimension_at_end(kept, which):  # type: ignore[no-untyped-def]
    """Coordinates that X* needs: those of the hull, unless the points have not come into it."""
    hull, dimension = int(kept.facts[which, HULL]), int(kept.facts[which, DIMENSION])
    largest, outside = 0.0, 0.0
    for i in range(kept.ends.shape[1]):
        square = 0.0
        for e in range(dimension):
            square += kept.ends[which, i, e] * kept.ends[which, i, e]
            if e == hull - 1:
                largest = max(largest, square)
                square = 0.0
        outside = max(outside, square)
    return dimension if outside > END_TOLERANCE * END_TOLERANCE * largest else hull
