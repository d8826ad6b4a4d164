"""Labelled clouds in space that mean, sum and covariance cannot tell apart.

Every cloud is moved and stretched so that its empirical mean is 0 and its empirical covariance the identity,
whatever its class, and every class has the same sizes. So a pooling of the coordinates that keeps the first
two moments and the number of points keeps nothing of the class; only the shape of the distribution is left.
(A backbone changes that: the neighbourhood graphs of different shapes do differ.)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from flowpool.lab.datasets.record import GraphDataset, both_directions, offsets

NUM_NEIGHBOURS = 6
NOISE = 0.05  # standard deviation, where the shapes have a radius of about 1

Shape = Callable[[np.random.Generator, int], np.ndarray]


def make_shapes(num_per_class: int = 50, *, seed: int = 0, min_points: int = 30, max_points: int = 120) -> GraphDataset:
    """Ten classes of clouds as graphs: node features = coordinates, edges = nearest neighbours.

    Cloud j of a class depends on ``seed`` and j alone, so that a larger dataset begins with the smaller one.
    Graphs go through the classes in turn: graph g has class g mod 10 and is cloud g // 10.

    Args:
        num_per_class: clouds of each class.
        seed: seed of all randomness.
        min_points, max_points: bounds, both included, of the number of points; at least 10.
    """
    if num_per_class < 1:
        raise ValueError(f"num_per_class is {num_per_class}; at least 1 is needed.")
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must not be negative.")
    if not 10 <= min_points <= max_points:
        raise ValueError(
            f"min_points is {min_points}, max_points {max_points}; needed is 10 <= min_points <= max_points."
        )
    clouds = []
    for cloud in range(num_per_class):
        # One size for all classes: the number of points says nothing about the class.
        size = int(np.random.default_rng([seed, cloud]).integers(min_points, max_points, endpoint=True))
        for number, shape in enumerate(SHAPES.values()):
            random = np.random.default_rng([seed, cloud, number])
            points = shape(random, size)  # (N, 3)
            clouds.append(standardise(points + NOISE * random.standard_normal(points.shape)))
    edges = [nearest_neighbours(points, NUM_NEIGHBOURS) for points in clouds]
    return GraphDataset(
        name="SHAPES",
        features=torch.from_numpy(np.concatenate(clouds).astype(np.float32)),
        node_ptr=offsets(np.array([len(points) for points in clouds])),
        edge_index=torch.from_numpy(np.concatenate(edges, axis=1)),
        edge_ptr=offsets(np.array([pairs.shape[1] for pairs in edges])),
        labels=torch.arange(len(SHAPES)).repeat(num_per_class),
        class_names=tuple(SHAPES),
    )


def standardise(points: np.ndarray) -> np.ndarray:
    """The cloud, centred and stretched to covariance identity (divided by N); ``(N, D)``."""
    centred = points - points.mean(axis=0)
    variances, axes = np.linalg.eigh(centred.T @ centred / len(points))
    # The symmetric root keeps the cloud's orientation; any other root would turn it.
    standardised: np.ndarray = centred @ (axes / np.sqrt(variances)) @ axes.T
    return standardised


def nearest_neighbours(points: np.ndarray, num_neighbours: int) -> np.ndarray:
    """Edges ``(2, E)`` between each point and its nearest others, in both directions."""
    squared = ((points[:, None, :] - points[None, :, :]) ** 2).sum(axis=2)  # (N, N)
    np.fill_diagonal(squared, np.inf)
    nearest = np.argsort(squared, axis=1, kind="stable")[:, :num_neighbours]  # (N, k)
    here = np.repeat(np.arange(len(points)), num_neighbours)
    return both_directions(np.stack([here, nearest.ravel()], axis=1), len(points))


def _unit(vectors: np.ndarray) -> np.ndarray:
    directions: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return directions


def _circle(angles: np.ndarray) -> np.ndarray:
    """``(N, 2)`` points on the unit circle."""
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _sphere(random: np.random.Generator, size: int) -> np.ndarray:
    return _unit(random.standard_normal((size, 3)))


def _ball(random: np.random.Generator, size: int) -> np.ndarray:
    return _sphere(random, size) * random.uniform(size=(size, 1)) ** (1 / 3)


def _torus(random: np.random.Generator, size: int) -> np.ndarray:
    thickness = random.uniform(0.25, 0.4)
    around = _circle(random.uniform(0, 2 * np.pi, size))
    across = thickness * _circle(random.uniform(0, 2 * np.pi, size))
    return np.column_stack([around * (1 + across[:, :1]), across[:, 1]])


def _cube(random: np.random.Generator, size: int) -> np.ndarray:
    points = random.uniform(-1, 1, (size, 3))
    points[np.arange(size), random.integers(3, size=size)] = random.choice([-1.0, 1.0], size)
    return points


def _helix(random: np.random.Generator, size: int) -> np.ndarray:
    turns = random.uniform(2, 3)
    along = random.uniform(-1, 1, size)
    return np.column_stack([_circle(np.pi * turns * along), along])


def _moons(random: np.random.Generator, size: int) -> np.ndarray:
    """Two half circles in planes that cross at a right angle, each through the middle of the other."""
    arc = _circle(random.uniform(0, np.pi, size)) - [0.0, 0.5]  # (N, 2)
    flat = np.zeros(size)
    first = np.column_stack([arc, flat])
    second = np.column_stack([flat, -arc[:, 1], arc[:, 0]])
    return np.where((np.arange(size) % 2 == 0)[:, None], first, second)


def _cross(random: np.random.Generator, size: int) -> np.ndarray:
    points = np.zeros((size, 3))
    points[np.arange(size), np.arange(size) % 3] = random.uniform(-1, 1, size)
    return points


def _clusters(random: np.random.Generator, size: int) -> np.ndarray:
    """Balls around the corners of a tetrahedron."""
    corners = np.array([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])
    return corners[np.arange(size) % 4] + random.uniform(0.1, 0.25) * random.standard_normal((size, 3))


def _knot(random: np.random.Generator, size: int) -> np.ndarray:
    """The trefoil knot."""
    angle = random.uniform(0, 2 * np.pi, size)
    flat = _circle(angle) + 2 * _circle(2 * angle) * [-1.0, 1.0]
    return np.column_stack([flat, np.sin(3 * angle)]) / 3


def _roll(random: np.random.Generator, size: int) -> np.ndarray:
    """A sheet that is rolled up one and a half times."""
    radius = random.uniform(0.3, 1, size)
    return np.column_stack([radius[:, None] * _circle(3 * np.pi * radius), random.uniform(-1, 1, size)])


SHAPES: dict[str, Shape] = {
    "sphere": _sphere,
    "ball": _ball,
    "torus": _torus,
    "cube": _cube,
    "helix": _helix,
    "moons": _moons,
    "cross": _cross,
    "clusters": _clusters,
    "knot": _knot,
    "roll": _roll,
}
