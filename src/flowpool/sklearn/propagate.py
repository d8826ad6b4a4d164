"""Graphs as sets: node features, and what they become when they are averaged over neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from sklearn.base import BaseEstimator, TransformerMixin, _fit_context
from sklearn.utils._param_validation import Interval
from sklearn.utils._tags import Tags
from sklearn.utils.validation import _check_feature_names_in, check_is_fitted

from flowpool.sklearn.sets import Floats, Sets, as_array, as_list, read_sets


class Propagate(TransformerMixin, BaseEstimator):
    r"""Turns graphs into sets of node vectors that know their neighbourhood, without training.

    .. math:: a^{(h + 1)}_v = \tfrac12 \Bigl(a^{(h)}_v + \tfrac1{\deg v} \sum_{u \to v} a^{(h)}_u\Bigr), \qquad
              y_v = (a^{(0)}_v, \dots, a^{(H)}_v)

    This is the continuous Weisfeiler-Lehman scheme of Togninalli et al. (2019). A node without neighbours keeps what it
    has.

    Args:
        rounds: H; zero leaves the node features as they are, apart from their scale.

    Attributes:
        mean_, scale_: what attributes are standardised by: of each feature over the nodes of the training graphs; zero
            and one for labels.
        categories_: values of each column of integer features, each of which became a feature; None for real features.
        n_features_in_: columns of ``x``; zero where there is none.

    A graph is an object with ``x`` and ``edge_index`` (PyTorch Geometric's ``Data``), or a pair ``(x, edge_index)``.
    The values of ``x`` say what it holds: integers are labels, and each becomes a feature; columns of zeros and ones
    are labels that already are features; everything else is an attribute and is standardised. Where ``x`` is None, the
    degree and its logarithm take its place.
    """

    _parameter_constraints: dict[str, list[Any]] = {"rounds": [Interval(Integral, 0, None, closed="left")]}  # noqa: RUF012

    def __init__(self, rounds: int = 2) -> None:
        self.rounds = rounds

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Sequence[Any], y: Any = None) -> Self:
        """Fits scale and labels to training graphs."""
        self._fit(_read_graphs(X))
        return self

    def transform(self, X: Sequence[Any]) -> list[Floats]:
        """One array ``(N_i, (rounds + 1) * D)`` per graph."""
        check_is_fitted(self)
        return self._transform(_read_graphs(X))

    @_fit_context(prefer_skip_nested_validation=True)
    def fit_transform(self, X: Sequence[Any], y: Any = None) -> list[Floats]:
        """:meth:`fit` and :meth:`transform` of the same graphs, read once."""
        graphs = _read_graphs(X)
        self._fit(graphs)
        return self._transform(graphs)

    def get_feature_names_out(self, input_features: ArrayLike | None = None) -> NDArray[np.object_]:
        """Names of the features of its sets: ``x0``, ``x0_7`` for the label 7, ``degree``, and ``x0_round1``."""
        check_is_fitted(self)
        names = ["degree", "log_degree"]
        if self.n_features_in_:
            names = list(_check_feature_names_in(self, input_features))
        if self.categories_ is not None:
            known = zip(names, self.categories_, strict=True)
            names = [f"{name}_{value:g}" for name, values in known for value in values]
        rounds = ["", *(f"_round{number}" for number in range(1, self.rounds + 1))]
        return np.asarray([name + suffix for suffix in rounds for name in names], dtype=object)

    def set_output(self, *, transform: str | None = None) -> Self:
        """Changes nothing, since sets are no table; for pipelines that set the output of all their steps."""
        return self

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "scale_")

    def _fit(self, graphs: _Graphs) -> None:
        self.n_features_in_ = 0 if graphs.features is None else graphs.features.members.shape[1]
        self.categories_ = None
        if graphs.are_labels and graphs.features is not None:
            self.categories_ = [np.unique(column) for column in graphs.features.members.T]
        values = self._start(graphs).astype(np.float64)
        # Labels that are features already keep their zeros and ones: rare ones must not outweigh the others.
        labels = np.isin(values, (0.0, 1.0)).all(axis=0)
        deviation = values.std(axis=0)
        constant = deviation <= 1e-12 * np.abs(values.mean(axis=0))
        self.mean_ = np.where(labels, 0.0, values.mean(axis=0))
        self.scale_ = np.where(labels | constant, 1.0, deviation)

    def _start(self, graphs: _Graphs) -> Floats:
        """Node features before their scale, ``(N, D)``."""
        found = 0 if graphs.features is None else graphs.features.members.shape[1]
        if found != self.n_features_in_:
            raise ValueError(
                f"X has {found} features, but {type(self).__name__} is expecting {self.n_features_in_} features as input."
            )
        if graphs.features is None:
            degrees = np.asarray(graphs.neighbours.sum(axis=1)).ravel()
            return np.stack([degrees, np.log1p(degrees)], axis=1)
        if (self.categories_ is not None) != graphs.are_labels:
            now, then = ("labels", "real numbers") if graphs.are_labels else ("real numbers", "labels")
            raise ValueError(f"x holds {now} here and held {then} in the training graphs; pass the same kind.")
        members = graphs.features.members
        if self.categories_ is None:
            return members
        columns = [column[:, None] == known for column, known in zip(members.T, self.categories_, strict=True)]
        return np.concatenate(columns, axis=1).astype(np.float64)  # a label that training graphs lack is all zeros

    def _transform(self, graphs: _Graphs) -> list[Floats]:
        start = self._start(graphs)
        values = (start - self.mean_) / self.scale_
        degrees = np.asarray(graphs.neighbours.sum(axis=1)).ravel()  # (N,)
        alone = (degrees == 0)[:, None]
        averages = sparse.diags_array(1 / np.maximum(degrees, 1)) @ graphs.neighbours
        width = values.shape[1]
        joined = np.empty((len(values), (self.rounds + 1) * width), start.dtype)  # (N, (H + 1) * D)
        joined[:, :width] = values
        for number in range(1, self.rounds + 1):
            values = np.where(alone, values, (values + averages @ values) / 2)
            joined[:, number * width : (number + 1) * width] = values
        return Sets(joined, graphs.ptr).arrays()


class _Graphs(NamedTuple):
    """Graphs side by side: their node features, None where they have none, and which nodes are joined."""

    features: Sets | None
    are_labels: bool
    neighbours: sparse.csr_array  # (N, N); row v counts the edges u -> v
    ptr: NDArray[np.int64]


def _read_graphs(graphs: Any) -> _Graphs:
    graphs = as_list(graphs)
    if not hasattr(graphs, "__len__") or len(graphs) == 0:
        raise ValueError("Pass a list of graphs with at least one graph.")
    pairs = [_parts(graph, number) for number, graph in enumerate(graphs)]
    kinds = {None if x is None else "labels" if x.dtype.kind in "iub" else "real" for x, _, _ in pairs}
    if len(kinds) > 1:
        raise ValueError("Some graphs have real features, some labels or none; all need the same kind.")
    features = None
    if kinds != {None}:
        features = read_sets([x[:, None] if x is not None and x.ndim == 1 else x for x, _, _ in pairs])
    sizes = np.array([size for _, _, size in pairs], dtype=np.int64)
    if features is not None:
        sizes = np.diff(features.ptr)
    if (sizes == 0).any():
        raise ValueError(f"Graph {int(np.argmin(sizes))} has no nodes. Leave it out.")
    ptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    for number, (_, edges, _) in enumerate(pairs):
        if edges.size and not (edges.min() >= 0 and edges.max() < sizes[number]):
            raise ValueError(
                f"Graph {number} has an edge to node {edges.max() if edges.min() >= 0 else edges.min()}; "
                f"its nodes are 0 to {sizes[number] - 1}."
            )
    counts = [edges.shape[1] for _, edges, _ in pairs]
    joined = np.concatenate([edges for _, edges, _ in pairs], axis=1).astype(np.int64)
    joined = joined + np.repeat(ptr[:-1], counts)
    shape = (int(ptr[-1]), int(ptr[-1]))
    neighbours = sparse.csr_array((np.ones(joined.shape[1]), (joined[1], joined[0])), shape=shape)
    return _Graphs(features, kinds == {"labels"}, neighbours, ptr)


def _parts(graph: Any, number: int) -> tuple[NDArray[Any] | None, NDArray[Any], int]:
    """Node features, edges ``(2, E)``, and the number of nodes as far as the edges tell."""
    if hasattr(graph, "edge_index"):
        x, edges, count = getattr(graph, "x", None), graph.edge_index, getattr(graph, "num_nodes", None)
    elif isinstance(graph, tuple | list) and len(graph) == 2:
        (x, edges), count = graph, None
    else:
        raise TypeError(f"Graph {number} is a {type(graph).__name__}; pass objects with x and edge_index, or pairs.")
    array = as_array(edges if edges is not None else np.empty((2, 0), np.int64))
    if array.ndim != 2 or array.shape[0] != 2 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"edge_index of graph {number} is {array.dtype} {array.shape}; expected integers, (2, E).")
    seen = int(array.max()) + 1 if array.size else 0
    return None if x is None else as_array(x), array, seen if count is None else int(count)
