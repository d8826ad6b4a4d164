"""Sets as vectors by methods other than ours, as scikit-learn transformers of lists of arrays."""

from __future__ import annotations

import math
from typing import Any, Literal, Self

import numpy as np
import ot
import torch
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.metrics.pairwise import rbf_kernel

from flowpool.lab.frozen.slices import NUM_SLICES, random_directions, shares_on_lines
from flowpool.lab.pools.otke import JITTER
from flowpool.pooling import flow_pool
from flowpool.sklearn.sets import Sets, read_sets
from flowpool.sklearn.vectorizer import centres_of
from flowpool.step.pool import transport_pool

Floats = NDArray[np.float64]


class Moments(TransformerMixin, BaseEstimator):
    """Sum, mean, or mean and standard deviations of the members."""

    def __init__(self, kind: Literal["sum", "mean", "deviations"] = "mean") -> None:
        self.kind = kind

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        return self

    def transform(self, X: Any, sample_weight: Any = None) -> Floats:
        sets = read_sets(X, sample_weight)
        masses = sets.masses[:, None]
        mean = sets.sum(masses * sets.members)  # (B, D)
        if self.kind == "mean":
            return mean
        if self.kind == "sum":
            return mean * sets.totals[:, None]
        centred = sets.members - np.repeat(mean, np.diff(sets.ptr), axis=0)
        return np.concatenate([mean, np.sqrt(sets.sum(masses * centred**2))], axis=1)


class Sorted(TransformerMixin, BaseEstimator):
    """SortPool (Zhang et al., 2018): the M members that are largest in the last feature, in that order, then zeros."""

    def __init__(self, num_points: int = 8) -> None:
        self.num_points = num_points

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        return self

    def transform(self, X: Any, sample_weight: Any = None) -> Floats:
        sets = read_sets(X)  # a ranking has no use for weights
        owner = np.repeat(np.arange(len(sets)), np.diff(sets.ptr))
        order = np.lexsort((-sets.members[:, -1], owner))
        rank = np.arange(len(order)) - sets.ptr[owner]
        chosen = rank < self.num_points
        points = np.zeros((len(sets), self.num_points, sets.members.shape[1]))
        points[owner[chosen], rank[chosen]] = sets.members[order][chosen]
        return points.reshape(len(sets), -1)


def _centres(num_points: int, random_state: int | None, sets: Any, sample_weight: Any) -> Floats:
    return centres_of(read_sets(sets, sample_weight), num_points, np.random.RandomState(random_state))


class _Referenced(TransformerMixin, BaseEstimator):
    """An embedding that starts from the k-means centres that `FlowVectorizer` starts from."""

    def __init__(self, num_points: int = 8, random_state: int | None = None) -> None:
        self.num_points = num_points
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        self.reference_ = _centres(self.num_points, self.random_state, X, sample_weight)
        return self


class WEGL(_Referenced):
    """Wasserstein embedding (Kolouri et al., 2021): where exact transport sends the reference, minus it, over sqrt(M)."""

    def transform(self, X: Any, sample_weight: Any = None) -> Floats:
        sets = read_sets(X, sample_weight)
        images = np.stack([self._image(sets.part(number, number + 1)) for number in range(len(sets))])  # (B, M, D)
        return ((images - self.reference_) / math.sqrt(len(self.reference_))).reshape(len(sets), -1)

    def _image(self, one: Sets) -> Floats:
        members = one.members.astype(np.float64)
        shares = np.full(len(self.reference_), 1 / len(self.reference_))
        plan: Floats = ot.emd(shares, one.masses, ot.dist(self.reference_, members))  # (M, N)
        return len(shares) * plan @ members


class Flow(_Referenced):
    """The M points of the whole flow, from the centres in units of each set's own scale around its mean."""

    EPSILON = 0.03  # of the variance inside each set

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        super().fit(X, sample_weight=sample_weight)
        sets = read_sets(X, sample_weight)
        masses = sets.masses / len(sets)
        mean = masses @ sets.members
        scale = math.sqrt(float(masses @ ((sets.members - mean) ** 2).sum(1))) or 1.0
        self.reference_ = (self.reference_ - mean) / scale
        return self

    def points(self, X: Any, sample_weight: Any = None) -> Floats:
        """``(B, M, D)``."""
        sets = read_sets(X, sample_weight)
        pooled = flow_pool(
            torch.from_numpy(sets.members.astype(np.float64)),
            ptr=torch.from_numpy(sets.ptr),
            reference=torch.from_numpy(self.reference_),
            epsilon=self.EPSILON,
            masses=None if sets.weights is None else torch.from_numpy(sets.weights),
            gradient="none",
            on_failure="ignore",
        )
        points: Floats = pooled.points.numpy()
        return points

    def transform(self, X: Any, sample_weight: Any = None) -> Floats:
        points = self.points(X, sample_weight)
        return points.reshape(len(points), -1) / math.sqrt(points.shape[1])


class Slices(TransformerMixin, BaseEstimator):
    """The quantiles of projections to random directions: means of M equal shares on each line."""

    def __init__(self, num_points: int = 8, random_state: int | None = None) -> None:
        self.num_points = num_points
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        random = np.random.RandomState(self.random_state)
        self.directions_ = random_directions(read_sets(X).members.shape[1], NUM_SLICES, random)
        return self

    def transform(self, X: Any, sample_weight: Any = None) -> Floats:
        sets = read_sets(X, sample_weight)
        middle = sets.members.mean(0, dtype=np.float64)  # in whose place sums would cancel
        shares = shares_on_lines(sets.with_members(sets.members - middle), self.directions_, self.num_points)
        shares += middle @ self.directions_
        unit = math.sqrt(len(self.directions_) / (NUM_SLICES * self.num_points))
        return unit * shares.reshape(len(sets), -1)


class FSW(TransformerMixin, BaseEstimator):
    """Fourier sliced-Wasserstein embedding (Amir and Dym, 2025), by the package of its authors."""

    def __init__(self, width: int = 512, random_state: int | None = None) -> None:
        self.width = width
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        from fswlib import FSWEmbedding

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.random_state or 0)
            self.embedding_ = FSWEmbedding(
                read_sets(X).members.shape[1],
                self.width,
                dtype=torch.float64,
                use_custom_cuda_extension_if_available=False,
            )
        return self

    @torch.no_grad()
    def transform(self, X: Any, sample_weight: Any = None) -> Floats:
        sets = read_sets(X, sample_weight)
        rows = []
        for number in range(len(sets)):
            one = sets.part(number, number + 1)
            members = torch.from_numpy(one.members.astype(np.float64))
            rows.append(self.embedding_(members, torch.from_numpy(one.masses)))
        vectors: Floats = torch.stack(rows).numpy()
        return vectors


class OTKE(_Referenced):
    """Optimal transport kernel embedding (Mialon et al., 2021) with the Gaussian kernel, by Nystroem features.

    As the pool of the bench, with more anchors. Its plan has the greatest mean product of features and reference points.
    With given masses on both sides that is the plan of the squared distance with twice the regularisation.
    """

    EPSILON = 0.5
    NUM_ANCHORS = 64

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        self.anchors_ = _centres(self.NUM_ANCHORS, self.random_state, X, sample_weight)  # (K, D)
        sets = read_sets(X, sample_weight)
        masses = sets.masses / len(sets)
        squares = ((sets.members - masses @ sets.members) ** 2).sum(1)
        self.bandwidth_ = math.sqrt(float(masses @ squares)) or 1.0
        return super().fit(self._features(sets).arrays(), sample_weight=sample_weight)

    def transform(self, X: Any, sample_weight: Any = None) -> Floats:
        sets = self._features(read_sets(X, sample_weight))
        received = transport_pool(
            torch.from_numpy(sets.members),
            ptr=torch.from_numpy(sets.ptr),
            reference=torch.from_numpy(self.reference_),
            epsilon=2 * self.EPSILON,
            relative=False,
            masses=None if sets.weights is None else torch.from_numpy(sets.weights),
        )
        vectors: Floats = received.points.flatten(1).numpy() / math.sqrt(len(self.reference_))
        return vectors

    def _features(self, sets: Sets) -> Sets:
        """Members ``(N, K)`` whose inner products approximate the kernel."""
        gamma = 1 / (2 * self.bandwidth_**2)
        among = rbf_kernel(self.anchors_, gamma=gamma) + JITTER * np.eye(len(self.anchors_))
        between = rbf_kernel(self.anchors_, sets.members.astype(np.float64), gamma=gamma)  # (K, N)
        factor = np.linalg.cholesky(among)
        return sets.with_members(np.ascontiguousarray(solve_triangular(factor, between, lower=True).T))
