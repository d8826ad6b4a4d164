r"""What pooling keeps of the distances between graphs: W_2 between pooled clouds against exact W_2 between the graphs.

Node features are averaged over neighbours twice, as in the frozen protocol. Every graph is brought to M points by each
of the methods, and W_2 is computed between the points; ``flow-step`` is a vector, whose Euclidean distance stands for
W_2. Nothing sees a label, except the support vector machine that tells what the distances are good for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.spatial.distance import pdist, squareform
from sklearn.cluster import KMeans
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.svm import SVC

from flowpool.lab.datasets import GraphDataset
from flowpool.lab.frozen.embeddings import WEGL, Flow
from flowpool.lab.frozen.methods import weights_of
from flowpool.lab.leakproof import subset
from flowpool.lab.paper import style
from flowpool.lab.paper.exhibit import write_table
from flowpool.sklearn import FlowVectorizer, Propagate, wasserstein_distances
from flowpool.sklearn.sets import Sets, read_sets

Floats = NDArray[np.float64]

POINTS = (2, 4, 8, 16)
NUM_FOLDS = 10
NUM_NEIGHBOURS = 5
EXACT = "all nodes"
_ROUNDS = 2
_GAMMAS, _PENALTIES = (0.5, 2.0), (1.0, 10.0, 100.0)  # of the kernel exp(-gamma W_2 / median), of the machine
_EQUAL = 1e-3  # of the median distance, below which graphs are equal and have no relative error


@dataclass(frozen=True)
class Between:
    """Distances of one method with one number of points.

    Attributes:
        dataset, method: which ones.
        num_points: M; 0 for all nodes.
        correlation: with exact W_2 over all pairs of graphs.
        error: mean relative error over these.
        neighbours: mean share of the five nearest graphs that are among the five nearest by exact W_2.
        accuracy: of a support vector machine with the kernel exp(-gamma W_2), in 10 folds, gamma and C chosen inside.
    """

    dataset: str
    method: str
    num_points: int
    correlation: float
    error: float
    neighbours: float
    accuracy: float


def between_table(
    graphs: GraphDataset,
    points: Sequence[int] = POINTS,
    *,
    count: int | None = None,
    seed: int = 0,
    on_progress: Callable[[int], None] = lambda _: None,
) -> list[Between]:
    """One row for the exact distances, then one per method and number of points.

    Args:
        graphs: at least ten of each class.
        points: numbers of points, M.
        count: at most so many graphs, drawn with the seed; None: all.
        seed: of the sample, of references and of the folds.
        on_progress: called with one after each row.
    """
    if count is not None and count < len(graphs):
        graphs = subset(graphs, np.sort(np.random.default_rng(seed).permutation(len(graphs))[:count]))
    if (fewest := int(graphs.labels.bincount().min())) < NUM_FOLDS:
        raise ValueError(
            f"{len(graphs)} graphs of {graphs.name} have {fewest} of a class, and the kernel's accuracy needs {NUM_FOLDS} "
            "of each, one for each fold. Take more graphs."
        )
    clouds = Propagate(_ROUNDS if graphs.edge_index.shape[1] else 0).fit_transform(list(graphs))
    sets, labels = read_sets(clouds, weights_of(graphs)), graphs.labels.numpy()
    exact = _distances(sets.arrays(), _weights(sets))
    rows = [Between(graphs.name, EXACT, 0, 1.0, 0.0, 1.0, kernel_accuracy(exact, labels, seed))]
    on_progress(1)
    for method, measure in METHODS.items():
        for num_points in points:
            found = measure(sets, num_points, seed)
            told = compare(exact, found), kernel_accuracy(found, labels, seed)
            rows.append(Between(graphs.name, method, num_points, *told[0], told[1]))
            on_progress(1)
    return rows


def compare(exact: Floats, found: Floats) -> tuple[float, float, float]:
    """Correlation, mean relative error and share of neighbours kept, of two matrices of distances ``(B, B)``."""
    one, other = squareform(exact, checks=False), squareform(found, checks=False)
    apart = one > _EQUAL * np.median(one)
    error = float(np.mean(np.abs(other[apart] / one[apart] - 1)))
    kept = [len(set(a) & set(b)) for a, b in zip(_nearest(exact), _nearest(found), strict=True)]
    return float(np.corrcoef(one, other)[0, 1]), error, float(np.mean(kept)) / NUM_NEIGHBOURS


def kernel_accuracy(distances: Floats, labels: NDArray[np.int64], seed: int) -> float:
    """Mean accuracy over the folds."""
    scaled = distances / np.median(squareform(distances, checks=False))
    kernels = [np.exp(-gamma * scaled) for gamma in _GAMMAS]
    inner = StratifiedKFold(3, shuffle=True, random_state=seed)
    scores = []
    for train, test in StratifiedKFold(NUM_FOLDS, shuffle=True, random_state=seed).split(labels, labels):
        searches = [
            GridSearchCV(SVC(kernel="precomputed"), {"C": _PENALTIES}, cv=inner).fit(
                kernel[np.ix_(train, train)], labels[train]
            )
            for kernel in kernels
        ]
        best = int(np.argmax([search.best_score_ for search in searches]))
        scores.append(searches[best].score(kernels[best][np.ix_(test, train)], labels[test]))
    return float(np.mean(scores))


def _flow(sets: Sets, num_points: int, seed: int) -> Floats:
    flow = Flow(num_points, random_state=seed).fit(sets.arrays(), sample_weight=_weights(sets))
    return _distances(flow.points(sets.arrays(), _weights(sets)))


def _step(sets: Sets, num_points: int, seed: int) -> Floats:
    vectorizer = FlowVectorizer(num_points, by="step", size=None, random_state=seed)
    between: Floats = squareform(pdist(vectorizer.fit_transform(sets.arrays(), sample_weight=_weights(sets))))
    return between


def _wegl(sets: Sets, num_points: int, seed: int) -> Floats:
    embedding = WEGL(num_points, random_state=seed)
    vectors = embedding.fit(sets.arrays(), sample_weight=_weights(sets)).transform(sets.arrays(), _weights(sets))
    moved = vectors.reshape(len(sets), *embedding.reference_.shape) * math.sqrt(len(embedding.reference_))
    return _distances(moved + embedding.reference_)


def _kmeans(sets: Sets, num_points: int, seed: int) -> Floats:
    """The centres of each graph by itself, each with the mass of its nodes: the nearest M points of any masses."""
    clouds: list[Floats] = []
    masses: list[Floats] = []
    for one in sets.parts(1):
        distinct = len(np.unique(one.members, axis=0))
        kmeans = KMeans(min(num_points, distinct), n_init=1, random_state=seed).fit(
            one.members, sample_weight=one.masses
        )
        clouds.append(kmeans.cluster_centers_)
        masses.append(np.bincount(kmeans.labels_, one.masses, len(kmeans.cluster_centers_)).astype(np.float64))
    return _distances(clouds, masses)


def _random_nodes(sets: Sets, num_points: int, seed: int) -> Floats:
    random, clouds = np.random.default_rng(seed), []
    for one in sets.parts(1):
        present = int((one.masses > 0).sum())
        chosen = random.choice(len(one.members), min(num_points, present), replace=False, p=one.masses)
        clouds.append(one.members[chosen])
    return _distances(clouds)


METHODS: dict[str, Callable[[Sets, int, int], Floats]] = {
    "flow": _flow,
    "flow-step": _step,
    "wegl": _wegl,
    "k-means per graph": _kmeans,
    "random nodes": _random_nodes,
}


def write_csv(rows: Sequence[Between], path: Path) -> Path:
    """One line per row."""
    lines = [asdict(row) for row in rows]
    return write_table({name: [line[name] for line in lines] for name in lines[0]}, path)


def between_plot(rows: Sequence[Between]) -> Figure:
    """Correlation, error, neighbours and accuracy against M; one line of panels per dataset, one line per method."""
    names = list(dict.fromkeys(row.dataset for row in rows))
    columns = {
        "correlation": "correlation with exact $W_2$",
        "error": "relative error",
        "neighbours": f"{NUM_NEIGHBOURS} nearest graphs kept",
        "accuracy": "accuracy of the kernel",
    }
    with style.applied():
        figure, grid = style.canvas(len(columns), len(names), width=11.0, height=2.7 * len(names))
        for line, name in zip(np.atleast_2d(grid), names, strict=True):
            own = [row for row in rows if row.dataset == name]
            for axes, (column, title) in zip(line, columns.items(), strict=True):
                for number, method in enumerate(METHODS):
                    found = [row for row in own if row.method == method]
                    values = [getattr(row, column) for row in found]
                    axes.plot(
                        [row.num_points for row in found],
                        values,
                        style.LINES[number % len(style.LINES)],
                        color=style.CYCLE[number],
                        marker="o",
                        markersize=3,
                        label=method,
                    )
                exact = next(row for row in own if row.method == EXACT)
                axes.axhline(getattr(exact, column), color=style.GREY, ls=":", lw=1.0, label=EXACT)
                axes.set_xscale("log", base=2)
                axes.set_xticks(sorted({row.num_points for row in own if row.num_points}))
                axes.xaxis.set_major_formatter("{x:.0f}")
                axes.set_xlabel("points M")
                axes.set_title(title)
            line[0].set_ylabel(name)
            line[0].legend()
    return figure


def _distances(clouds: Any, masses: list[Floats] | None = None) -> Floats:
    return wasserstein_distances(clouds, masses_a=masses)


def _weights(sets: Sets) -> list[Floats] | None:
    return None if sets.weights is None else np.split(sets.weights, sets.ptr[1:-1])


def _nearest(distances: Floats) -> NDArray[np.intp]:
    """Numbers of the nearest graphs of each, ``(B, 5)``."""
    others = distances + np.diag(np.full(len(distances), np.inf))
    return np.argsort(others, axis=1, kind="stable")[:, :NUM_NEIGHBOURS]
