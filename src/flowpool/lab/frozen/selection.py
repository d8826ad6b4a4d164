"""What is chosen inside the training graphs, from the same grid for every method, and the classifier that comes of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import sklearn
from numpy.typing import NDArray
from sklearn.model_selection import StratifiedKFold, train_test_split
from sklearn.svm import SVC, _libsvm

from flowpool.lab.datasets import GraphDataset
from flowpool.lab.frozen.methods import METHODS, Fitted

Floats = NDArray[np.float64]
_Numbers = NDArray[np.intp]

NUM_INNER_FOLDS = 3
MOST_FOR_SELECTION = 600  # training graphs by which settings are compared; the classifier gets all


@dataclass(frozen=True)
class Setting:
    """One entry of the grid.

    Attributes:
        rounds: how often features were averaged over neighbours.
        view: columns of the vectors as they are or standardised, or a kernel of its own.
        size: weight of the squared difference of the standardised log sizes, in units of the median squared distance.
        kernel: ``"rbf"``: exp(-gamma d^2); ``"laplace"``: exp(-gamma d), d in units of its median; ``"own"``.
        gamma: its width; None for an own kernel.
        penalty: C of the support vector machine.
        validation_accuracy: mean over the inner folds; None before they were run.
    """

    rounds: int
    view: str
    size: float
    kernel: str
    gamma: float | None
    penalty: float
    validation_accuracy: float | None = None


@dataclass(frozen=True)
class Grid:
    """The values among which the inner folds choose; the first of equals wins."""

    rounds: tuple[int, ...] = (0, 2, 4)
    sizes: tuple[float, ...] = (0.0, 0.1)
    kernels: tuple[str, ...] = ("rbf", "laplace")
    gammas: tuple[float, ...] = (0.1, 0.5, 2.0)
    penalties: tuple[float, ...] = (1.0, 10.0, 100.0)

    def rounds_for(self, graphs: GraphDataset) -> tuple[int, ...]:
        """The rounds that make a difference: without edges all are the same."""
        return self.rounds if graphs.edge_index.shape[1] else self.rounds[:1]

    def settings(self, rounds: int, view: str) -> Iterator[Setting]:
        if view == "kernel":
            yield from (Setting(rounds, view, 0.0, "own", None, penalty) for penalty in self.penalties)
            return
        for values in itertools.product(self.sizes, self.kernels, self.gammas, self.penalties):
            yield Setting(rounds, view, *values)


class _Units(NamedTuple):
    """What distances and sizes are measured by, taken from the training graphs."""

    median: float  # of squared distances
    deviation: float


class _Part(NamedTuple):
    """An inner fold: kernels among its training graphs and from its test graphs to these, with the labels of both."""

    train: Floats
    train_labels: NDArray[np.int64]
    test: Floats
    test_labels: NDArray[np.int64]


class Learned:
    """A classifier for graphs: a setting, fitted to all training graphs, whose view of each other is ``values``."""

    def __init__(self, graphs: GraphDataset, fitted: Fitted, values: Floats, setting: Setting) -> None:
        self.setting, self.width = setting, fitted.width
        self._fitted, self._sizes = fitted, _log_sizes(graphs)
        self._units = _units(values, self._sizes)
        self._machine = SVC(C=setting.penalty, kernel="precomputed")
        self._machine.fit(self._kernel(values, self._sizes), graphs.labels.numpy())

    def predict(self, graphs: GraphDataset) -> list[int]:
        """Class numbers; the labels of ``graphs`` are not looked at."""
        values = self._fitted.views(graphs)[self.setting.view]
        predictions: list[int] = self._machine.predict(self._kernel(values, _log_sizes(graphs))).tolist()
        return predictions

    def _kernel(self, values: Floats, sizes: Floats) -> Floats:
        return _kernel(values, sizes, self._sizes, self._units, self.setting)


@sklearn.config_context(assume_finite=True, skip_parameter_validation=True)  # hundreds of small machines per call
def learn(graphs: GraphDataset, method: str, num_points: int, seed: int, grid: Grid) -> Learned:
    """The classifier of a method, everything chosen and fitted on these graphs alone."""
    labels = graphs.labels.numpy()
    chosen = _drawn(labels, seed)
    inner = _inner_folds(labels[chosen], seed)
    best: tuple[Setting, Fitted, Floats] | None = None
    sizes = _log_sizes(graphs)
    for rounds in grid.rounds_for(graphs):
        fitted = METHODS[method](graphs, rounds, num_points, seed)
        for view, values in fitted.views(graphs).items():
            among, units = values[np.ix_(chosen, chosen)], _units(values, sizes)
            last: tuple[tuple[object, ...], list[_Part]] | None = None
            for setting in grid.settings(rounds, view):
                key = (setting.size, setting.kernel, setting.gamma)
                if last is None or last[0] != key:  # the penalty varies fastest
                    kernel = _kernel(among, sizes[chosen], sizes[chosen], units, setting)
                    last = key, _parts(kernel, labels[chosen], inner)
                accuracy = _validation_accuracy(last[1], setting.penalty)
                if best is None or accuracy > (best[0].validation_accuracy or 0.0):
                    best = replace(setting, validation_accuracy=accuracy), fitted, values
    if best is None:
        raise ValueError("The grid is empty; give at least one value for each of its entries.")
    setting, fitted, values = best
    return Learned(graphs, fitted, values, setting)


def _parts(kernel: Floats, labels: NDArray[np.int64], inner: Sequence[tuple[_Numbers, _Numbers]]) -> list[_Part]:
    return [
        _Part(kernel[np.ix_(train, train)], labels[train], kernel[np.ix_(test, train)], labels[test])
        for train, test in inner
    ]


def _validation_accuracy(parts: list[_Part], penalty: float) -> float:
    """Mean over the inner folds of what ``SVC(C=penalty, kernel="precomputed")`` predicts rightly.

    Its solver is called directly: the estimator spends as long on checks as these small machines need in all.
    """
    _libsvm.set_verbosity_wrap(0)
    scores = []
    for part in parts:
        found = _libsvm.fit(part.train, part.train_labels.astype(np.float64), kernel="precomputed", C=penalty)
        predictions = _libsvm.predict(part.test, *found[:7], kernel="precomputed")
        scores.append(np.mean(predictions == part.test_labels))
    return float(np.mean(scores))


def _drawn(labels: NDArray[np.int64], seed: int) -> _Numbers:
    """Numbers of the graphs by which settings are compared."""
    everyone = np.arange(len(labels))
    if len(labels) <= MOST_FOR_SELECTION:
        return everyone
    drawn, _ = train_test_split(everyone, train_size=MOST_FOR_SELECTION, stratify=labels, random_state=seed % 2**32)
    return np.sort(drawn)


def _inner_folds(labels: NDArray[np.int64], seed: int) -> list[tuple[_Numbers, _Numbers]]:
    folds = StratifiedKFold(NUM_INNER_FOLDS, shuffle=True, random_state=seed % 2**32)
    return list(folds.split(labels, labels))


def _units(values: Floats, sizes: Floats) -> _Units:
    between = values[np.triu_indices(len(values), 1)]
    return _Units(float(np.median(between)) or 1.0, float(sizes.std()) or 1.0)


def _kernel(values: Floats, sizes: Floats, train_sizes: Floats, units: _Units, setting: Setting) -> Floats:
    if setting.gamma is None:
        return values
    squares = values / units.median
    if setting.size:
        squares = squares + setting.size * (np.subtract.outer(sizes, train_sizes) / units.deviation) ** 2
    kernel: Floats = np.exp(-setting.gamma * (np.sqrt(squares) if setting.kernel == "laplace" else squares))
    return kernel


def _log_sizes(graphs: GraphDataset) -> Floats:
    """Logarithm of the number of nodes, or of their mass."""
    sizes = graphs.node_ptr.diff().double().numpy()
    if graphs.masses is not None:
        sizes = np.add.reduceat(graphs.masses.double().numpy(), graphs.node_ptr[:-1].numpy())
    logarithms: Floats = np.log(sizes)
    return logarithms
