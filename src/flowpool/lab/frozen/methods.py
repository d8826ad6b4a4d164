"""Every embedding and kernel of the frozen protocol, behind one interface.

A method is fitted to the training graphs and then tells, for any graphs, how far they are from the training graphs. A
further embedding is one more entry of ``EMBEDDINGS``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import one_hot

from flowpool.lab.datasets import GraphDataset
from flowpool.lab.frozen.embeddings import FSW, OTKE, WEGL, Flow, Moments, Slices, Sorted
from flowpool.sklearn import FlowVectorizer, Propagate, wasserstein_distances

Floats = NDArray[np.float64]


class Fitted(Protocol):
    """A method that has seen the training graphs.

    Attributes:
        width: numbers per graph; zero where graphs are compared directly.
    """

    width: int

    def views(self, graphs: GraphDataset) -> dict[str, Floats]:
        """Ways to compare ``graphs`` with the training graphs, each ``(B, num_train)``; the same names for all graphs.

        Squared distances, or kernel values if the name is ``"kernel"``.
        """


class Method(Protocol):
    """Fits a method to training graphs whose features were averaged over neighbours ``rounds`` times."""

    def __call__(self, graphs: GraphDataset, rounds: int, num_points: int, seed: int) -> Fitted: ...


def weights_of(graphs: GraphDataset) -> list[Floats] | None:
    """Masses of the nodes of each graph, or None if they are equal."""
    if graphs.masses is None:
        return None
    return np.split(graphs.masses.double().numpy(), graphs.node_ptr[1:-1].numpy())


def labels_are_degrees(graphs: GraphDataset) -> bool:
    """Whether the features only say the degree of each node, which is what datasets without features come with."""
    starts = graphs.node_ptr[:-1].repeat_interleave(graphs.edge_ptr.diff())
    degrees = torch.bincount(graphs.edge_index[0] + starts, minlength=len(graphs.features))
    columns = degrees.clamp(max=graphs.num_features - 1)
    return torch.equal(graphs.features, one_hot(columns, graphs.num_features).to(graphs.features))


class _Sets:
    """Graphs as sets, by what `Propagate` learned from the training graphs.

    Degrees are handed over as numbers, not as labels, of which neighbouring ones would be as far apart as any others.
    """

    def __init__(self, graphs: GraphDataset, rounds: int) -> None:
        self._graphs, self._propagate = graphs, Propagate(rounds)
        self._by_degree = labels_are_degrees(graphs)
        self._train = self._propagate.fit_transform(self._described(graphs))

    def __call__(self, graphs: GraphDataset) -> tuple[list[Any], list[Floats] | None]:
        sets = self._train if graphs is self._graphs else self._propagate.transform(self._described(graphs))
        return sets, weights_of(graphs)

    def _described(self, graphs: GraphDataset) -> list[Any]:
        if not self._by_degree:
            return list(graphs)
        return [SimpleNamespace(edge_index=graph.edge_index, num_nodes=len(graph.x)) for graph in graphs]


class _Vectors:
    """A transformer, and distances between its vectors: as they are, and with standardised columns."""

    def __init__(self, transformer: Any, graphs: GraphDataset, rounds: int) -> None:
        self._sets = _Sets(graphs, rounds)
        sets, weights = self._sets(graphs)
        self._graphs, self._transformer = graphs, transformer.fit(sets, sample_weight=weights)
        self._train = self._vectors(sets, weights)  # (B, K)
        self.width = self._train.shape[1]
        self._middle, deviation = self._train.mean(0), self._train.std(0)
        varies = deviation > 1e-9 * max(float(deviation.max()), np.finfo(float).tiny)
        self._scale = np.where(varies, deviation, np.inf)  # what is constant in training says nothing

    def views(self, graphs: GraphDataset) -> dict[str, Floats]:
        vectors = self._train if graphs is self._graphs else self._vectors(*self._sets(graphs))
        standardised = (vectors - self._middle) / self._scale, (self._train - self._middle) / self._scale
        return {"raw": squared_distances(vectors, self._train), "standardised": squared_distances(*standardised)}

    def _vectors(self, sets: list[Any], weights: list[Floats] | None) -> Floats:
        vectors: Floats = self._transformer.transform(sets, sample_weight=weights).astype(np.float64)
        return vectors


class _Wasserstein:
    """W_2^2 between the node clouds, or between clouds of M points that stand for them."""

    width = 0

    def __init__(self, graphs: GraphDataset, rounds: int, compressor: Flow | None) -> None:
        self._sets = _Sets(graphs, rounds)
        self._compressor = compressor
        if compressor is not None:
            sets, weights = self._sets(graphs)
            compressor.fit(sets, sample_weight=weights)
            self.width = compressor.reference_.size
        self._train = self._clouds(graphs)
        self._graphs = graphs

    def views(self, graphs: GraphDataset) -> dict[str, Floats]:
        clouds, masses = self._train if graphs is self._graphs else self._clouds(graphs)
        others, their_masses = (None, None) if graphs is self._graphs else self._train
        found = wasserstein_distances(clouds, others, masses_a=masses, masses_b=their_masses)
        return {"raw": found**2}

    def _clouds(self, graphs: GraphDataset) -> tuple[Any, list[Floats] | None]:
        sets, weights = self._sets(graphs)
        if self._compressor is None:
            return sets, weights
        return self._compressor.points(sets, sample_weight=weights), None


class _WeisfeilerLehman:
    """The subtree kernel (Shervashidze et al., 2011) by GraKeL, normalised."""

    width = 0

    def __init__(self, graphs: GraphDataset, rounds: int) -> None:
        from grakel.kernels import VertexHistogram, WeisfeilerLehman

        self._graphs = graphs
        if rounds == 0:  # GraKeL wants at least one round
            self._kernel = VertexHistogram(normalize=True)
        else:
            self._kernel = WeisfeilerLehman(n_iter=rounds, base_graph_kernel=VertexHistogram, normalize=True)
        self._between = self._kernel.fit_transform(_labelled(graphs))

    def views(self, graphs: GraphDataset) -> dict[str, Floats]:
        between = self._between if graphs is self._graphs else self._kernel.transform(_labelled(graphs))
        return {"kernel": np.nan_to_num(np.asarray(between, dtype=np.float64))}  # a graph without known labels: 0 / 0


def _labelled(graphs: GraphDataset) -> list[Any]:
    values = graphs.features
    if not bool(((values == 0) | (values == 1)).all()) or not bool((values.sum(1) == 1).all()):
        raise ValueError(f"The nodes of {graphs.name} have attributes; the method wl compares labels alone.")
    return [
        ([tuple(edge) for edge in graph.edge_index.T.tolist()] or {}, dict(enumerate(graph.x.argmax(1).tolist())))
        for graph in graphs
    ]


def squared_distances(one: Floats, other: Floats) -> Floats:
    """``(A, B)``, none below zero."""
    middle = other.mean(0)  # squares of distances are differences of squares, in which an offset would cancel
    one, other = one - middle, other - middle
    squares: Floats = np.maximum((one**2).sum(1)[:, None] + (other**2).sum(1) - 2 * one @ other.T, 0)
    return squares


def _vectors(build: Callable[[int, int], Any]) -> Method:
    def fit(graphs: GraphDataset, rounds: int, num_points: int, seed: int) -> Fitted:
        return _Vectors(build(num_points, seed), graphs, rounds)

    return fit


def _flow_vectorizer(num_points: int, seed: int, by: Literal["step", "free"] = "step") -> FlowVectorizer:
    # The size is offered to every method alike, see `flowpool.lab.frozen.selection`.
    return FlowVectorizer(num_points, by=by, size=None, random_state=seed)


def _exact(graphs: GraphDataset, rounds: int, num_points: int, seed: int) -> Fitted:
    return _Wasserstein(graphs, rounds, None)


def _compressed(graphs: GraphDataset, rounds: int, num_points: int, seed: int) -> Fitted:
    return _Wasserstein(graphs, rounds, Flow(num_points, seed))


def _weisfeiler_lehman(graphs: GraphDataset, rounds: int, num_points: int, seed: int) -> Fitted:
    return _WeisfeilerLehman(graphs, rounds)


_DEFAULT_POINTS = FlowVectorizer().num_points
_LOT_POINTS = 64
_FSW_WIDTH = 512  # that of the slices

METHODS: dict[str, Method] = {
    # As it is by default, however many points others have.
    "flow-vectorizer": _vectors(lambda num_points, seed: _flow_vectorizer(_DEFAULT_POINTS, seed)),
    "flow-step": _vectors(_flow_vectorizer),
    "flow-free": _vectors(lambda num_points, seed: _flow_vectorizer(_DEFAULT_POINTS, seed, "free")),
    "flow": _vectors(Flow),
    "mean": _vectors(lambda num_points, seed: Moments("mean")),
    "sum": _vectors(lambda num_points, seed: Moments("sum")),
    "mean-deviations": _vectors(lambda num_points, seed: Moments("deviations")),
    "sort": _vectors(lambda num_points, seed: Sorted(num_points)),
    "wegl": _vectors(WEGL),
    # Linear optimal transport (Wang et al., 2013): the same map, of a reference as fine as the sets themselves.
    "lot": _vectors(lambda num_points, seed: WEGL(_LOT_POINTS, seed)),
    "fsw": _vectors(lambda num_points, seed: FSW(_FSW_WIDTH, seed)),
    "otke": _vectors(OTKE),
    "slices": _vectors(Slices),
    "wasserstein": _exact,
    "wasserstein-flow": _compressed,
    "wl": _weisfeiler_lehman,
}
