r"""Places in the plane for the nodes of a graph.

Distances in the picture follow the number of edges between nodes, as in the layout of Kamada and Kawai (1989):

.. math:: \min_Z \sum_{i < j} d_{ij}^{-2} \bigl(|z_i - z_j| - d_{ij}\bigr)^2

minimised by majorisation (Gansner, Koren and North, 2004), which needs one linear map, found once, and is fast enough to
leaf through a dataset.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import shortest_path

Floats = NDArray[np.float64]

_ROUNDS = 200
_STILL = 1e-4  # movement per round, relative to the size of the picture, at which the layout is done


def layout(edges: NDArray[np.int64], num_nodes: int) -> Floats:
    """Places ``(N, 2)``, centred, the farthest coordinate at one, the longer side of the graph lying across.

    Args:
        edges: both directions of every edge, ``(2, E)``.
        num_nodes: N.
    """
    if num_nodes == 1:
        return np.zeros((1, 2))
    wanted = _distances(edges, num_nodes)
    weights = np.divide(1.0, wanted**2, out=np.zeros_like(wanted), where=wanted > 0)
    laplacian = np.diag(weights.sum(1)) - weights
    inverse = np.linalg.pinv(laplacian, hermitian=True)
    places = _classical_scaling(wanted)
    for _ in range(_ROUNDS):
        actual = np.linalg.norm(places[:, None] - places, axis=-1)
        pull = np.divide(weights * wanted, actual, out=np.zeros_like(wanted), where=actual > 0)
        moved = inverse @ (np.diag(pull.sum(1)) - pull) @ places
        done = np.abs(moved - places).max() < _STILL * np.abs(moved).max()
        places = moved
        if done:
            break
    _, _, axes = np.linalg.svd(places - places.mean(0), full_matrices=False)
    turned = (places - places.mean(0)) @ axes.T
    framed: Floats = turned / np.abs(turned).max()
    return framed


def _distances(edges: NDArray[np.int64], num_nodes: int) -> Floats:
    """Edges on the shortest way between every two nodes; parts that are not connected keep a small distance."""
    adjacency = coo_matrix((np.ones(edges.shape[1]), edges), shape=(num_nodes, num_nodes))
    hops: Floats = shortest_path(adjacency.tocsr(), unweighted=True, directed=False)
    reachable = np.isfinite(hops)
    return np.where(reachable, hops, 0.5 * hops[reachable].max() + np.sqrt(num_nodes))


def _classical_scaling(distances: Floats) -> Floats:
    """The two leading coordinates, with a seeded trace of noise: equal places would never part."""
    size = len(distances)
    centring = np.eye(size) - 1 / size
    values, vectors = np.linalg.eigh(-0.5 * centring @ distances**2 @ centring)
    places = vectors[:, -2:] * np.sqrt(np.maximum(values[-2:], 0))
    noise = np.random.default_rng(0).standard_normal((size, 2))
    scattered: Floats = places + 0.01 * max(float(np.abs(places).max()), 1.0) * noise
    return scattered
