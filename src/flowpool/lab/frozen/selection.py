"""What is chosen inside the training graphs, from the same grid for every method, and the classifier that comes of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowpool.lab.datasets import GraphDataset
from flowpool.lab.leakproof import Practice
from flowpool.lab.metrics import Metric
from flowpool.lab.results import Candidate

if TYPE_CHECKING:
    from flowpool.lab.configuration import Configuration
    from flowpool.lab.frozen.methods import Fitted

Array = NDArray[Any]
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
        penalty: C of the support vector machine; of ridge regression, where numbers are predicted, 1 / (2 ridge).
    """

    rounds: int
    view: str
    size: float
    kernel: str
    gamma: float | None
    penalty: float


@dataclass(frozen=True)
class KernelGrid:
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
    """An inner fold: kernels among its training graphs and from its test graphs to these, with the targets of both."""

    train: Floats
    train_labels: Array
    test: Floats
    test_labels: Array


class Ridge:
    """Kernel ridge regression of one or more centred targets, ``(B, T)``."""

    def __init__(self, penalty: float) -> None:
        self.ridge = 1 / (2 * penalty)

    def fit(self, kernel: Floats, targets: Floats) -> Ridge:
        from scipy.linalg import solve

        self.mean = targets.mean(0)
        ridged = kernel + self.ridge * np.eye(len(kernel))
        self.weights = solve(ridged, targets - self.mean, assume_a="sym")
        return self

    def predict(self, kernel: Floats) -> Floats:
        predictions: Floats = kernel @ self.weights + self.mean
        return predictions


def machine_for(metric: Metric, penalty: float) -> Any:
    """An estimator of kernels."""
    from sklearn.svm import SVC

    return Ridge(penalty) if metric.kind == "numbers" else SVC(C=penalty, kernel="precomputed")


def predicted(machine: Any, kernel: Floats, metric: Metric) -> Array:
    """For `Metric.score`."""
    if not metric.ranks:
        predictions: Array = machine.predict(kernel)
        return predictions
    scores = machine.decision_function(kernel)
    return np.stack([-scores, scores], 1) if scores.ndim == 1 else scores


class LearnedKernel:
    """A setting, fitted to all training graphs, whose view of each other is ``values``."""

    def __init__(
        self, graphs: GraphDataset, fitted: Fitted, values: Floats, setting: Setting, metric: Metric, seconds: float
    ) -> None:
        began = time.perf_counter()
        self._fitted, self._sizes, self._setting, self._metric = fitted, _log_sizes(graphs), setting, metric
        self._units = _units(values, self._sizes)
        self._machine = machine_for(metric, setting.penalty)
        self._machine.fit(self._kernel(values, self._sizes), graphs.labels.numpy())
        self.about = {"seconds": seconds + time.perf_counter() - began, "width": fitted.width}

    def predict(self, graphs: GraphDataset) -> Array:
        values = self._fitted.views(graphs)[self._setting.view]
        return predicted(self._machine, self._kernel(values, _log_sizes(graphs)), self._metric)

    def _kernel(self, values: Floats, sizes: Floats) -> Floats:
        return _kernel(values, sizes, self._sizes, self._units, self._setting)


class KernelLearner:
    """A method of the frozen protocol; it keeps what it fitted for the best setting, so that nothing is fitted twice."""

    def __init__(self, configuration: Configuration, method: str) -> None:
        self.configuration, self.method = configuration, method
        self._best: tuple[float, Setting, Fitted, Floats] | None = None
        self._seconds = 0.0

    def candidates(self, practice: Practice, seed: int) -> list[Candidate]:
        """All settings by inner folds of the training graphs, everything fitted on these alone."""
        import sklearn

        began = time.perf_counter()
        # Hundreds of small machines per call.
        with sklearn.config_context(assume_finite=True, skip_parameter_validation=True):
            found = list(self._tried(practice.graphs, seed))
        self._seconds = time.perf_counter() - began
        return found

    def learn(self, practice: Practice, setting: dict[str, Any], seed: int) -> LearnedKernel:
        if self._best is None or asdict(self._best[1]) != setting:
            raise ValueError("Only the best setting was kept; ask for that one.")
        _, best, fitted, values = self._best
        return LearnedKernel(practice.graphs, fitted, values, best, self.configuration.measure, self._seconds)

    def _tried(self, graphs: GraphDataset, seed: int) -> Iterator[Candidate]:
        from flowpool.lab.frozen.methods import METHODS

        grid, metric = self.configuration.kernels, self.configuration.measure
        labels, sizes = graphs.labels.numpy(), _log_sizes(graphs)
        chosen = _drawn(labels, seed)
        inner = _inner_folds(labels[chosen], seed)
        for rounds in grid.rounds_for(graphs):
            fitted = METHODS[self.method](graphs, rounds, self.configuration.shape.num_points, seed)
            for view, values in fitted.views(graphs).items():
                among, units = values[np.ix_(chosen, chosen)], _units(values, sizes)
                last: tuple[tuple[object, ...], list[_Part]] | None = None
                for setting in grid.settings(rounds, view):
                    key = (setting.size, setting.kernel, setting.gamma)
                    if last is None or last[0] != key:  # the penalty varies fastest
                        kernel = _kernel(among, sizes[chosen], sizes[chosen], units, setting)
                        last = key, _parts(kernel, labels[chosen], inner)
                    score = inner_score(last[1], setting.penalty, metric)
                    if self._best is None or metric.better(score, self._best[0]):
                        self._best = score, setting, fitted, values
                    yield Candidate(asdict(setting), score)


def _parts(kernel: Floats, labels: Array, inner: Sequence[tuple[_Numbers, _Numbers]]) -> list[_Part]:
    return [
        _Part(kernel[np.ix_(train, train)], labels[train], kernel[np.ix_(test, train)], labels[test])
        for train, test in inner
    ]


def inner_score(parts: list[_Part], penalty: float, metric: Metric) -> float:
    """Mean over the inner folds of what a machine with this penalty scores.

    Where classes are counted, the solver of ``SVC(C=penalty, kernel="precomputed")`` is called directly: the estimator
    spends as long on checks as these small machines need in all.
    """
    from sklearn.svm import _libsvm

    scores = []
    for part in parts:
        if metric.kind == "classes" and not metric.ranks:
            _libsvm.set_verbosity_wrap(0)
            found = _libsvm.fit(part.train, part.train_labels.astype(np.float64), kernel="precomputed", C=penalty)
            predictions = _libsvm.predict(part.test, *found[:7], kernel="precomputed")
        else:
            machine = machine_for(metric, penalty).fit(part.train, part.train_labels)
            predictions = predicted(machine, part.test, metric)
        scores.append(metric.score(predictions, part.test_labels))
    return float(np.mean(scores))


def _drawn(labels: Array, seed: int) -> _Numbers:
    """Numbers of the graphs by which settings are compared."""
    from sklearn.model_selection import train_test_split

    everyone = np.arange(len(labels))
    if len(labels) <= MOST_FOR_SELECTION:
        return everyone
    classes = labels if labels.ndim == 1 else None
    drawn, _ = train_test_split(everyone, train_size=MOST_FOR_SELECTION, stratify=classes, random_state=seed % 2**32)
    return np.sort(drawn)


def _inner_folds(labels: Array, seed: int) -> list[tuple[_Numbers, _Numbers]]:
    from sklearn.model_selection import KFold, StratifiedKFold

    kind = StratifiedKFold if labels.ndim == 1 else KFold
    return list(kind(NUM_INNER_FOLDS, shuffle=True, random_state=seed % 2**32).split(labels, labels))


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
