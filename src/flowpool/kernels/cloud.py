"""The nodes of one graph made small: equal nodes merged, coordinates rotated into their hull.

X* lies in the hull of the nodes. Directions of the start that lead out of it are kept as further coordinates of the points,
at most M of them, in which the nodes are zero.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from flowpool.core.constants import LEADING, MOST_LEADING
from flowpool.kernels.machine.jit import kernel, shared
from flowpool.kernels.machine.lanes import WIDTH, fma, load, multiply, splat, store, total
from flowpool.kernels.machine.linear import padded
from flowpool.kernels.machine.rows import stay_apart
from flowpool.kernels.scratch import (
    CLOUD,
    CLOUD_FIRST,
    PLACES,
    open_cloud,
    place_track,
    place_work,
    reserve,
    single_width,
    to_single,
)

WIDEST = 512  # largest M K for which the Hessian of the K leading coordinates is formed where it is singular

_NUMBERS = CLOUD_FIRST + CLOUD.fields["length"][0]  # place of the first number of a cloud

# Distance from the hull so far, relative to the size of the points, that is no further direction.
START_TOLERANCE = 1e-13
END_TOLERANCE = 1e-9


@shared
def room(count, hull):  # type: ignore[no-untyped-def]
    """Coordinates of which the Hessian can be formed: all, where that is affordable."""
    return hull if count * hull <= WIDEST else min(hull, max(1, MOST_LEADING // count))


@kernel
def leading(coordinates, masses, length, hull, count, epsilon):  # type: ignore[no-untyped-def]
    """K, the coordinates of which the Hessian is formed: all if it is small, else those that hold nearly all the variance."""
    stay_apart()
    most = max(1, MOST_LEADING // count)
    if hull <= most:
        return hull
    left = 0.0
    for e in range(hull, 0, -1):
        variance = splat(0.0)
        for j in range(0, length, WIDTH):
            value = load(coordinates, e, j)
            variance = fma(multiply(load(masses, 0, j), value), value, variance)
        left += total(variance)
        if left > LEADING * epsilon:
            return min(e, most)
    return 1


@shared
def place_cloud(places, used, count, features, length, hull, dimension):  # type: ignore[no-untyped-def]
    """Numbers used by the arrays of ``CLOUD``."""
    widest = room(count, hull)
    columns = 1 + hull + widest * (widest + 1) // 2
    used = reserve(places, CLOUD_FIRST, 1, used, 1, count)
    used = reserve(places, CLOUD_FIRST + 1, 1, used, 1, length)
    used = reserve(places, CLOUD_FIRST + 2, 1, used, columns, length)
    used = reserve(places, CLOUD_FIRST + 3, 1, used, 1 + hull, (length + 1) // 2)
    used = reserve(places, CLOUD_FIRST + 4, 1, used, dimension + 1, features)
    used = reserve(places, CLOUD_FIRST + 5, 2, used, count, features)
    used = reserve(places, CLOUD_FIRST + 7, 1, used, 1, max(length, features))
    return reserve(places, CLOUD_FIRST + 8, 1, used, features, length)


@lru_cache(maxsize=4096)
def scratch_size(count: int, features: int, most: int) -> int:
    """Numbers that a thread needs for graphs of up to ``most`` nodes."""
    # A smaller graph may need more than the largest, because there is room for its whole Hessian.
    smaller = min(most, max(1, WIDEST // count))
    return max(_numbers(count, features, most), _numbers(count, features, smaller))


def _numbers(count: int, features: int, atoms: int) -> int:
    places = np.empty((PLACES, 2), np.int64)
    hull = min(features, atoms)
    dimension = min(features, hull + count)
    used = place_cloud(places, 0, count, features, padded(atoms), hull, dimension)
    used = place_track(places, used, count, dimension)
    used = place_work(places, used, count, padded(atoms), dimension, room(count, hull))
    return int(used)


@kernel
def make_cloud(nodes, features, members, merged, atoms, given_masses, epsilon, resolution, buffer, places):  # type: ignore[no-untyped-def]
    """The cloud of some atoms, and how many numbers of the buffer are used.

    Args:
        resolution: distance from the hull, relative to the farthest node, that counts as nothing.
    """
    stay_apart()
    count = len(given_masses)
    length = padded(atoms)
    reach = min(features, atoms)
    used = place_cloud(places, 0, count, features, length, reach, min(features, reach + count))
    cloud = open_cloud(buffer, places)
    for i in range(count):
        cloud.point_masses[0, i] = given_masses[i]
    for j in range(length):
        cloud.masses[0, j] = merged[j] if j < atoms else 0.0
    coordinates = cloud.coordinates
    hull = rotate_nodes(nodes, features, members, atoms, resolution, cloud.basis, cloud.rest, coordinates, cloud.row)
    for e in range(1 + hull):
        to_single(coordinates, e, length, cloud.singles)
    lead = leading(coordinates, cloud.masses, length, hull, count, epsilon)
    fill_moment_columns(coordinates, length, hull, lead)
    numbers = (length, single_width(length), hull, lead, room(count, hull))
    for k in range(len(numbers)):
        places[_NUMBERS + k, 0] = numbers[k]
    return cloud, used


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
def merge_nodes(bits, masses, first, last, with_empty, table, members, merged, atom_of):  # type: ignore[no-untyped-def]
    """Number of distinct nodes among ``first .. last``, called atoms.

    ``members[k]`` is the first node with the features of atom k, ``merged[k]`` the mass of all such nodes, and
    ``atom_of[node - first]`` is k.

    Args:
        with_empty: whether nodes without mass are atoms, too. They change no solution, but have a gradient in their mass.
        bits: the features as integers, ``(N, D)``, so that equal means equal.
        table: scratch of a power of two of more than twice the number of nodes, all -1; it is left so.
    """
    stay_apart()
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
def rotate_nodes(nodes, features, members, count, tolerance, basis, rest, coordinates, work_row):  # type: ignore[no-untyped-def]
    """Dimension of the hull of the nodes; fills its basis, ``(R, D)``, and the coordinates, rows 1 .. R of ``(1 + R, N)``.

    Gram-Schmidt on the nodes, the farthest from the hull so far first. ``rest``, ``(D, N)``, is what is left of them.
    """
    stay_apart()
    length = padded(count)
    for j in range(count):
        for d in range(features):
            rest[d, j] = nodes[members[j], d]
    for d in range(features):
        for j in range(count, length):
            rest[d, j] = 0.0
    for j in range(0, length, WIDTH):
        square = splat(0.0)
        for d in range(features):
            value = load(rest, d, j)
            square = fma(value, value, square)
        store(work_row, 0, j, square)
        store(coordinates, 0, j, splat(1.0))
    largest = 0.0
    found = 0
    while found < min(features, count):
        farthest = 0
        for j in range(count):
            if work_row[0, j] > work_row[0, farthest]:
                farthest = j
        if found == 0:
            largest = work_row[0, farthest]
        if not work_row[0, farthest] > tolerance * tolerance * largest:
            break
        for d in range(features):
            basis[found, d] = rest[d, farthest]
        if not next_direction(basis, found, features, largest, tolerance):
            break
        for j in range(0, length, WIDTH):
            inner = splat(0.0)
            for d in range(features):
                inner = fma(splat(basis[found, d]), load(rest, d, j), inner)
            store(coordinates, 1 + found, j, inner)
            square = splat(0.0)
            for d in range(features):
                value = fma(splat(-basis[found, d]), inner, load(rest, d, j))
                store(rest, d, j, value)
                square = fma(value, value, square)
            store(work_row, 0, j, square)
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
