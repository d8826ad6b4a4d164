"""How the default of `FlowVectorizer` was chosen: accuracies on sets that are in none of our tables.

Bags of the package ``mil``, 600 graphs of Mutagenicity, letters of six fonts as weighted clouds in the plane, and ten
surfaces and curves in space, other than those of SHAPES, with mean 0 and covariance identity. The frozen protocol with
five folds, twice; vectors are fitted once, on all sets of a dataset, since nothing in them has seen a label.

    python benchmarks/choice.py --data FOLDER
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.svm import SVC

from flowpool.lab.datasets import load_graphs
from flowpool.lab.datasets.shapes import nearest_neighbours, standardise
from flowpool.lab.frozen.methods import squared_distances
from flowpool.lab.frozen.selection import Grid
from flowpool.lab.leakproof import subset
from flowpool.sklearn import FlowVectorizer, Propagate

WAYS: dict[str, dict[str, Any]] = {
    "step": {"by": "step"},
    "slices": {"by": "sliced", "spread": False},
    "both": {"by": "both"},
}
NUM_GRAPHS = 600  # of a large dataset
NUM_FORMS, NUM_LETTERS = 40, 30  # of each class
FONTS = [("DejaVu Sans", 400), ("DejaVu Serif", 400), ("DejaVu Sans Mono", 400)]
FONTS += [(family, 700) for family, _ in FONTS]

Dataset = tuple[list[list[Any]], list[Any] | None, np.ndarray]  # sets by rounds, weights, labels


def bags(name: str, data: str | None) -> Dataset:
    graphs = load_graphs(name, data)
    if len(graphs) > NUM_GRAPHS and graphs.edge_index.shape[1]:
        graphs = subset(graphs, np.sort(np.random.default_rng(0).permutation(len(graphs))[:NUM_GRAPHS]))
    rounds = 2 if graphs.edge_index.shape[1] else 0
    return [Propagate(rounds).fit_transform(list(graphs))], None, graphs.labels.numpy()


def forms() -> Dataset:
    """Clouds of 30 to 120 points, turned a little, with noise."""
    clouds, labels = [], []
    for number in range(NUM_FORMS):
        for label, form in enumerate(FORMS):
            random = np.random.default_rng([5, number, label])
            size = int(np.random.default_rng([5, number]).integers(30, 121))
            turn = np.linalg.qr(np.eye(3) + 0.25 * random.standard_normal((3, 3))).Q
            points = form(random, size) + 0.08 * random.standard_normal((size, 3))
            clouds.append(standardise(points @ (turn * np.sign(np.diag(turn)))))
            labels.append(label)
    graphs = [(points, nearest_neighbours(points, 6)) for points in clouds]
    return [Propagate(rounds).fit_transform(graphs) for rounds in (0, 2)], None, np.array(labels)


def letters() -> Dataset:
    """Small letters on a grid of 8 x 8 pixels, moved, stretched and sheared, with ink as weight."""
    random = np.random.default_rng(3)
    sets, weights, labels = [], [], []
    grid = np.stack(np.meshgrid(*[np.linspace(0, 1, 40)] * 2), axis=-1).reshape(-1, 2)
    for number in range(26 * NUM_LETTERS):
        family, weight = FONTS[random.integers(len(FONTS))]
        text = TextPath((0, 0), chr(97 + number % 26), size=1, prop=FontProperties(family=family, weight=weight))
        low, high = text.vertices.min(0), text.vertices.max(0)
        inked = grid[text.contains_points(low + grid * (high - low))] - 0.5
        places = inked @ (0.9 * (np.eye(2) + 0.12 * random.standard_normal((2, 2)))) + 0.5
        pixels = np.clip(8 * (places + 0.05 * random.standard_normal(2)), 0, 7.99).astype(int)
        ink = np.zeros((8, 8))
        np.add.at(ink, tuple(pixels.T), 1.0)
        ink = np.floor(np.clip(ink / ink.max() * 16 * random.uniform(0.6, 1), 0, 16))
        sets.append(np.argwhere(ink > 0) / 8)
        weights.append(ink[ink > 0])
        labels.append(number % 26)
    return [sets], weights, np.array(labels)


def _circle(angles: np.ndarray) -> np.ndarray:
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _around(radii: np.ndarray, heights: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Points around an axis, ``(N, 3)``."""
    return np.column_stack([radii[:, None] * _circle(random.uniform(0, 2 * np.pi, len(radii))), heights])


def _cylinder(random: np.random.Generator, size: int) -> np.ndarray:
    return _around(np.ones(size), random.uniform(-1, 1, size), random)


def _cone(random: np.random.Generator, size: int) -> np.ndarray:
    radii = np.sqrt(random.uniform(size=size))
    return _around(radii, radii, random)


def _discs(random: np.random.Generator, size: int) -> np.ndarray:
    return _around(np.sqrt(random.uniform(size=size)), random.choice([-1.0, 1.0], size), random)


def _bowl(random: np.random.Generator, size: int) -> np.ndarray:
    radii = np.sqrt(random.uniform(size=size))
    return _around(radii, radii**2, random)


def _tetrahedron(random: np.random.Generator, size: int) -> np.ndarray:
    corners = np.array([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])
    shares = np.insert(random.dirichlet([1, 1, 1], size), 3, 0, axis=1)  # of three corners
    return random.permuted(shares, axis=1) @ corners


def _star(random: np.random.Generator, size: int) -> np.ndarray:
    return np.eye(3)[random.integers(3, size=size)] * random.uniform(-1, 1, (size, 1))


def _loops(random: np.random.Generator, size: int) -> np.ndarray:
    angles = random.uniform(0, 2 * np.pi, size)
    return np.stack([np.sin(angles), np.sin(angles) * np.cos(angles), 0.5 * np.sin(3 * angles)], axis=1)


def _shells(random: np.random.Generator, size: int) -> np.ndarray:
    vectors = random.standard_normal((size, 3))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) * random.choice([0.4, 1.0], (size, 1))


def _spiral(random: np.random.Generator, size: int) -> np.ndarray:
    along = random.uniform(size=size)
    return np.column_stack([along[:, None] * _circle(4 * np.pi * along), 0.3 * random.uniform(-1, 1, size)])


def _saddle(random: np.random.Generator, size: int) -> np.ndarray:
    plane = random.uniform(-1, 1, (size, 2))
    return np.column_stack([plane, plane[:, 0] ** 2 - plane[:, 1] ** 2])


FORMS: list[Callable[[np.random.Generator, int], np.ndarray]]
FORMS = [_cylinder, _cone, _discs, _bowl, _tetrahedron, _star, _loops, _shells, _spiral, _saddle]


def accuracies(dataset: Dataset, options: dict[str, Any]) -> np.ndarray:
    """Of ten test folds, with rounds, columns, kernel, width and C chosen inside each of the rest."""
    (versions, weights, labels), grid, kernels = dataset, Grid(), []
    for sets in versions:
        vectors = FlowVectorizer(8, size=None, random_state=0, **options).fit_transform(sets, sample_weight=weights)
        deviations = vectors.std(0)
        scale = np.where(deviations > 1e-9 * deviations.max(), deviations, np.inf)
        for values in (vectors, (vectors - vectors.mean(0)) / scale):
            squares = squared_distances(values, values)
            squares /= np.median(squares[np.triu_indices(len(squares), 1)])
            kernels += [np.exp(-gamma * d) for d in (squares, np.sqrt(squares)) for gamma in grid.gammas]
    found = []
    for repeat in range(2):
        inner = StratifiedKFold(3, shuffle=True, random_state=repeat)
        for train, test in StratifiedKFold(5, shuffle=True, random_state=repeat).split(labels, labels):
            searches = [
                GridSearchCV(SVC(kernel="precomputed"), {"C": grid.penalties}, cv=inner).fit(
                    kernel[np.ix_(train, train)], labels[train]
                )
                for kernel in kernels
            ]
            best = int(np.argmax([search.best_score_ for search in searches]))
            found.append(searches[best].score(kernels[best][np.ix_(test, train)], labels[test]))
    return np.array(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data")
    data = parser.parse_args().data
    torch.set_num_threads(1)
    datasets: dict[str, Callable[[], Dataset]] = {"forms": forms, "letters": letters}
    for name in ("ELEPHANT", "COREL-DOGS", "BIRDS", "TRX", "Mutagenicity"):
        datasets[name] = lambda name=name: bags(name, data)  # type: ignore[misc]
    print("| | " + " | ".join(WAYS) + " |\n|---" + "|---" * len(WAYS) + "|")
    table = []
    for name, load in datasets.items():
        dataset = load()
        table.append([100 * accuracies(dataset, options).mean() for options in WAYS.values()])
        print(f"| {name} | " + " | ".join(f"{value:.1f}" for value in table[-1]) + " |", flush=True)
    print("| average | " + " | ".join(f"{value:.1f}" for value in np.mean(table, axis=0)) + " |")
