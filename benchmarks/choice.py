"""How the default of `FlowVectorizer` was chosen: accuracies of a support vector machine inside of training parts.

Orbits as those of ORBIT5K with other parameters; forms (surfaces and curves in space with mean 0 and covariance identity,
other than those of SHAPES); letters of six fonts as weighted clouds in the plane; Mutagenicity; and the training part of
the first of ten folds of ENZYMES, PTC_MR, DIGITS and SHAPES. At most 400 sets of each, 600 orbits.

Five folds. Inside of each training part, vectors are fitted without labels, and three inner folds choose rounds of
propagation, whether columns are standardised, kernel, width and C. The rule, fixed before it was run: the highest mean
accuracy; among ways within 0.4 points of it the one with the fewest numbers; a way that is more than a point behind the
best on orbits is out. By it free shares win. They were left out afterwards, since their distances are not near to W_2, see
benchmarks/vectorizer.py. The figures in docs/vectorizer.md are of an earlier script with the same sets and grid, before
vectors were rotated.

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
from sklearn.model_selection import StratifiedKFold, train_test_split
from sklearn.svm import SVC

from flowpool.lab.datasets import load_graphs
from flowpool.lab.datasets.shapes import nearest_neighbours, standardise
from flowpool.lab.frozen.embeddings import Slices
from flowpool.lab.frozen.methods import squared_distances, weights_of
from flowpool.lab.frozen.selection import KernelGrid
from flowpool.lab.leakproof import subset
from flowpool.sklearn import FlowVectorizer, Propagate

PARTS: dict[str, Callable[[], Any]] = {
    "step 8": lambda: FlowVectorizer(8, size=None, random_state=0),
    "step 16": lambda: FlowVectorizer(16, size=None, random_state=0),
    "step 32": lambda: FlowVectorizer(32, size=None, random_state=0),
    "free 32": lambda: FlowVectorizer(32, by="free", size=None, random_state=0),
    "slices": lambda: Slices(8, random_state=0),
}
WAYS = {name: (name,) for name in PARTS}
WAYS |= {f"{name} and {other}": (name, other) for name, other in [("step 8", "slices"), ("step 32", "slices")]}
WAYS |= {"step 32 and free 32": ("step 32", "free 32")}
ORBITS = (2.3, 3.2, 3.8, 3.95, 4.2)
NUM_SETS, NUM_ORBITS = 400, 120  # at most; of each class
NUM_FORMS, NUM_LETTERS = 40, 30  # of each class
FONTS = [("DejaVu Sans", 400), ("DejaVu Serif", 400), ("DejaVu Sans Mono", 400)]
FONTS += [(family, 700) for family, _ in FONTS]

Dataset = tuple[list[list[Any]], list[Any] | None, np.ndarray]  # sets by rounds, weights, labels


def known(name: str, data: str | None) -> Dataset:
    graphs = load_graphs(name, data)
    labels = graphs.labels.numpy()
    chosen = np.arange(len(labels))
    if name != "Mutagenicity":  # which is in no table
        chosen, _ = next(StratifiedKFold(10, shuffle=True, random_state=0).split(labels, labels))
    if len(chosen) > NUM_SETS:
        chosen, _ = train_test_split(chosen, train_size=NUM_SETS, stratify=labels[chosen], random_state=0)
    graphs = subset(graphs, np.sort(chosen))
    rounds = (0, 2) if graphs.edge_index.shape[1] else (0,)
    return [Propagate(count).fit_transform(list(graphs)) for count in rounds], weights_of(graphs), graphs.labels.numpy()


def orbits() -> Dataset:
    """600 points each."""
    parameters = np.tile(ORBITS, NUM_ORBITS)
    x, y = np.random.default_rng(11).random((2, len(parameters)))
    points = np.empty((len(parameters), 600, 2))
    for step in range(600):
        x = (x + parameters * y * (1 - y)) % 1
        y = (y + parameters * x * (1 - x)) % 1
        points[:, step, 0], points[:, step, 1] = x, y
    return [list(points)], None, np.tile(np.arange(len(ORBITS)), NUM_ORBITS)


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
    chosen = np.sort(np.random.default_rng(0).permutation(len(labels))[:NUM_SETS])
    return [[sets[i] for i in chosen]], [weights[i] for i in chosen], np.array(labels)[chosen]


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


def accuracies(dataset: Dataset) -> dict[str, tuple[float, int]]:
    """Mean accuracy over five folds, and the numbers per set, of each way."""
    versions, weights, labels = dataset
    grid, found, widths = KernelGrid(), {way: [] for way in WAYS}, {}
    for fold, (train, test) in enumerate(StratifiedKFold(5, shuffle=True, random_state=0).split(labels, labels)):
        inner = list(StratifiedKFold(3, shuffle=True, random_state=fold).split(train, labels[train]))
        best: dict[str, tuple[float, Any, float]] = {}
        for sets in versions:
            parts = {name: _unit_vectors(make(), sets, weights, train) for name, make in PARTS.items()}
            for way, names in WAYS.items():
                vectors = np.concatenate([parts[name] for name in names], axis=1)
                widths[way] = vectors.shape[1]
                for kernel in _kernels(vectors, train, grid):
                    among = kernel[train]
                    for penalty in grid.penalties:
                        score = np.mean([_score(among, labels[train], one, other, penalty) for one, other in inner])
                        if way not in best or score > best[way][0]:
                            best[way] = float(score), kernel, penalty
        for way, (_, kernel, penalty) in best.items():
            square = np.zeros((len(labels), len(labels)))
            square[:, train] = kernel
            found[way].append(_score(square, labels, train, test, penalty))
    return {way: (100 * float(np.mean(scores)), widths[way]) for way, scores in found.items()}


def _unit_vectors(transformer: Any, sets: list[Any], weights: list[Any] | None, train: np.ndarray) -> np.ndarray:
    """Vectors with mean zero and total variance one among the training sets."""
    of_train = None if weights is None else [weights[number] for number in train]
    transformer.fit([sets[number] for number in train], sample_weight=of_train)
    vectors = transformer.transform(sets, sample_weight=weights).astype(np.float64)
    vectors -= vectors[train].mean(0)
    return vectors / np.sqrt(vectors[train].var(0).sum())


def _kernels(vectors: np.ndarray, train: np.ndarray, grid: KernelGrid) -> list[np.ndarray]:
    """From all sets to the training sets."""
    deviations = vectors[train].std(0)
    varies = deviations > 1e-3 * np.sqrt((deviations**2).mean())
    kernels = []
    for values in (vectors, vectors / np.where(varies, deviations, np.inf)):
        squares = squared_distances(values, values[train])
        squares /= np.median(squares[train][np.triu_indices(len(train), 1)])
        kernels += [np.exp(-gamma * distances) for distances in (squares, np.sqrt(squares)) for gamma in grid.gammas]
    return kernels


def _score(kernel: np.ndarray, labels: np.ndarray, train: np.ndarray, test: np.ndarray, penalty: float) -> float:
    machine = SVC(C=penalty, kernel="precomputed").fit(kernel[np.ix_(train, train)], labels[train])
    return float(machine.score(kernel[np.ix_(test, train)], labels[test]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data")
    data = parser.parse_args().data
    torch.set_num_threads(1)
    datasets: dict[str, Callable[[], Dataset]] = {"orbits": orbits, "forms": forms, "letters": letters}
    for name in ("DIGITS", "SHAPES", "ENZYMES", "PTC_MR", "Mutagenicity"):
        datasets[name] = lambda name=name: known(name, data)  # type: ignore[misc]
    print("| | " + " | ".join(WAYS) + " |\n|---" + "|---" * len(WAYS) + "|")
    table = []
    for name, load in datasets.items():
        row = accuracies(load())
        table.append([score for score, _ in row.values()])
        print(f"| {name} | " + " | ".join(f"{score:.1f} ({width})" for score, width in row.values()) + " |", flush=True)
    print("| average | " + " | ".join(f"{value:.1f}" for value in np.mean(table, axis=0)) + " |")
