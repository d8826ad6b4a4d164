"""Shares of sets on lines, where optimal transport keeps the order and is solved by sorting."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flowpool.sklearn.sets import Sets

Floats = NDArray[np.float64]

NUM_SLICES = 64
_ENTRIES_AT_ONCE = 2**19  # projections that are sorted at once: 4 MB, which caches hold


def random_directions(dim: int, num_lines: int, random: np.random.RandomState) -> Floats:
    """Unit vectors ``(D, L)`` from random orthonormal bases, each of which measures squared lengths without error."""
    drawn = random.standard_normal((-(-num_lines // dim), dim, min(dim, num_lines)))
    directions: Floats = np.concatenate(list(np.linalg.qr(drawn).Q), axis=1)[:, :num_lines]
    return directions


def shares_on_lines(sets: Sets, directions: Floats, num_shares: int) -> Floats:
    """Means of M equal shares of each set on each of L lines, from the lowest to the highest, ``(B, M, L)``.

    On a line, optimal transport to M points keeps the order; their shares are those between the quantiles i/M. Sets of
    one size are projected and sorted side by side.

    Args:
        sets: what is projected, without an offset in which sums would cancel.
        directions: of the lines, ``(D, L)``.
        num_shares: M.
    """
    sizes, masses = np.diff(sets.ptr), sets.masses
    lines, levels = np.ascontiguousarray(directions.T), np.arange(1, num_shares + 1) / num_shares
    means = np.empty((len(sets), num_shares, len(lines)))
    for size in np.unique(sizes):
        alike = np.flatnonzero(sizes == size)
        for some in np.array_split(alike, -(-len(alike) * size * len(lines) // _ENTRIES_AT_ONCE)):
            rows = sets.ptr[some, None] + np.arange(size)
            places = lines @ np.ascontiguousarray(sets.members[rows].transpose(0, 2, 1))  # (b, L, N)
            mass = masses[rows][:, None]  # (b, 1, N)
            if sets.weights is None:
                places.sort(axis=2)
            else:
                order = places.argsort(axis=2)
                places, mass = np.take_along_axis(places, order, 2), np.take_along_axis(mass, order, 2)
            reached, moment = mass.cumsum(2), np.cumsum(mass * places, 2)
            # The member in which a share ends, and how much of it is beyond.
            last = np.stack([(reached[:, :, :-1] < level).sum(2) for level in levels], axis=2)  # (b, 1 or L, M)
            beyond = np.take_along_axis(reached, last, 2) - levels
            below = np.take_along_axis(moment, last, 2) - beyond * np.take_along_axis(places, last, 2)
            means[some] = num_shares * np.diff(below, axis=2, prepend=0).transpose(0, 2, 1)
    return means
