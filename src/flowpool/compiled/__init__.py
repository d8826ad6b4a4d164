"""The compiled engine: the solver and its adjoint as Numba kernels, for the squared Euclidean cost on the CPU.

Two functions of NumPy arrays. Importing this package compiles nothing and does not import Numba; the first call does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from flowpool.compiled.engine import Adjoint, Array, Solved

__all__ = ["adjoint", "solve"]


def solve(
    nodes: Array,
    masses: Array,
    ptr: NDArray[np.int64],
    start: Array,
    point_masses: Array,
    epsilon: Array,
    tolerance: float,
    max_steps: int,
    threads: int,
) -> Solved:
    """X* of a ragged batch of graphs; see :func:`flowpool.compiled.engine.solve`."""
    from flowpool.compiled import engine

    return engine.solve(nodes, masses, ptr, start, point_masses, epsilon, tolerance, max_steps, threads)


def adjoint(
    nodes: Array,
    masses: Array,
    ptr: NDArray[np.int64],
    points: Array,
    potentials: Array,
    self_potentials: Array,
    point_masses: Array,
    epsilon: Array,
    ridge: float,
    cotangent: Array,
    threads: int,
) -> Adjoint:
    """Gradients of ``<cotangent, X*>``; see :func:`flowpool.compiled.engine.adjoint`."""
    from flowpool.compiled import engine

    return engine.adjoint(
        nodes, masses, ptr, points, potentials, self_potentials, point_masses, epsilon, ridge, cotangent, threads
    )
