r"""Sets as vectors whose Euclidean distance is close to the Wasserstein distance between the sets.

All sets are sent to the same M reference points, each of which receives 1/M of every set. A set becomes the mean and
the standard deviations of what each point received, beside the quantiles of its projections to random directions, both
scaled so that the distance of two such vectors approximates W_2; docs/vectorizer.md has the derivation.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, TransformerMixin, _fit_context
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils._tags import Tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import _check_feature_names_in, check_array, check_is_fitted

from flowpool.pooling import flow_pool
from flowpool.sklearn.sets import Floats, Sets, read_sets
from flowpool.step.pool import transport_pool

NUM_SLICES = 64  # random directions
_ENTRIES_AT_ONCE = 2**22  # numbers per temporary array: 32 MB of float64
_ROUNDING = 1e-10  # of the mean square of a set on a line, below which a variance is none
_EQUAL = 1e-24  # of the mean square of all members, below which a variance is rounding
_MEMBERS_FOR_KMEANS = 50_000  # more do not move the centres visibly


class FlowVectorizer(TransformerMixin, BaseEstimator):
    r"""Turns sets of vectors, of any sizes, into vectors of one length.

    The means :math:`\hat x_i` and standard deviations :math:`\sigma_i` of what M shared reference points receive of a
    set, in equal shares, by one entropic transport, beside the means :math:`q_{li}` of M equal shares of the set on 64
    lines in random directions:

    .. math:: v = \tfrac1{\sqrt{2 M}} (\hat x_1, \dots, \hat x_M, \sigma_1, \dots, \sigma_M, c\, q), \qquad
              |v - v'| \approx W_2(Y, Y')

    where c makes the mean squared distance between training sets the same in both halves.

    Args:
        num_points: M; fewer shares in space where the training sets have fewer distinct members.
        by: ``"both"``: shares in space and on lines, as above. ``"step"``: the shares in space alone: fewer numbers, and
            closer to W_2 where features are real numbers. ``"sliced"``: the shares on lines alone, without a reference.
            ``"free"``: each point receives what is near it, and the vector says how much: a soft histogram. ``"flow"``:
            the M points with the least Sinkhorn divergence to the set, for compressing and decoding rather than
            comparing as vectors.
        spread: whether the standard deviations of shares are part of the vector; with ``"both"``, of those in space. The
            points of ``"flow"`` are spread as the set is; there is nothing to leave out there.
        reference: ``"kmeans"``: centres of the members of the training sets; or an array ``(M, D)``.
        epsilon: entropic regularisation, in units of the mean variance (summed over features) inside a training set, or
            of that between them where each is one place; with ``"flow"``, inside each set.
        size: how the vector says how large a set is, which its distribution forgets: ``"log"`` appends the logarithm of
            the number of members, or of their total weight, ``"append"`` that number itself, None nothing. Distances
            approximate W_2 without that last column.
        standardize: divide each feature by its standard deviation over the training sets first, for features in
            different units.
        random_state: of k-means and of random directions.

    Attributes:
        reference_: ``(M, D)``; for ``"flow"`` in units of each set's own scale around its mean. None for ``"sliced"``.
        mean_, scale_: of each feature over the training sets, all sets counting the same, ``(D,)``; zeros and ones
            unless ``standardize``.
        variance_: mean variance inside a training set, summed over features.
        directions_: ``(D, 64)`` unit vectors, for ``"both"`` and ``"sliced"``.
        balance_: c above over :math:`\sqrt{D / 64}`, with which slices bound W_2 from below; for ``"both"``.
        n_features_in_: D.

    Fitting and transforming take a list of arrays ``(N_i, D)``, a list of objects that have one as ``x`` (PyTorch
    Geometric's ``Data``), an array ``(B, N, D)``, or one stacked array ``(N, D)`` with ``groups`` or ``offsets``.

    >>> import numpy as np
    >>> from flowpool.sklearn import FlowVectorizer
    >>> random = np.random.default_rng(0)
    >>> sets = [random.normal(size=(size, 3)) for size in (20, 35, 50)]
    >>> FlowVectorizer(4).fit_transform(sets).shape
    (3, 281)
    """

    _parameter_constraints: dict[str, list[Any]] = {  # noqa: RUF012 - as scikit-learn declares them
        "num_points": [Interval(Integral, 1, None, closed="left")],
        "by": [StrOptions({"both", "step", "free", "flow", "sliced"})],
        "spread": ["boolean"],
        "reference": [StrOptions({"kmeans"}), "array-like"],
        "epsilon": [Interval(Real, 0, None, closed="neither")],
        "size": [StrOptions({"log", "append"}), None],
        "standardize": ["boolean"],
        "random_state": ["random_state"],
    }

    def __init__(
        self,
        num_points: int = 8,
        *,
        by: Literal["both", "step", "free", "flow", "sliced"] = "both",
        spread: bool = True,
        reference: Literal["kmeans"] | ArrayLike = "kmeans",
        epsilon: float = 0.03,
        size: Literal["log", "append"] | None = "log",
        standardize: bool = False,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.num_points = num_points
        self.by = by
        self.spread = spread
        self.reference = reference
        self.epsilon = epsilon
        self.size = size
        self.standardize = standardize
        self.random_state = random_state

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        groups: ArrayLike | None = None,
        offsets: ArrayLike | None = None,
    ) -> Self:
        """Fits scale and reference to training sets.

        Args:
            X: the sets; see the class.
            y: not used.
            sample_weight: weights of the members: one array ``(N_i,)`` per set, or ``(N,)`` for a stacked array.
            groups: set of each row of a stacked array, ``(N,)``; sets are returned in the order of their sorted numbers.
            offsets: or where each set begins in it, and the end, ``(B + 1,)``.
        """
        self._check_choices()
        self._fit(read_sets(X, sample_weight, groups=groups, offsets=offsets))
        return self

    def transform(
        self,
        X: Any,
        sample_weight: Any = None,
        *,
        groups: ArrayLike | None = None,
        offsets: ArrayLike | None = None,
    ) -> Floats:
        """One row per set, ``(B, n_features_out)``, float32 if the sets are; arguments as in :meth:`fit`."""
        check_is_fitted(self)
        return self._weighted(self._pooled(read_sets(X, sample_weight, groups=groups, offsets=offsets)))

    @_fit_context(prefer_skip_nested_validation=True)
    def fit_transform(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        groups: ArrayLike | None = None,
        offsets: ArrayLike | None = None,
    ) -> Floats:
        """:meth:`fit` and :meth:`transform` of the same sets, read and pooled once."""
        self._check_choices()
        sets = read_sets(X, sample_weight, groups=groups, offsets=offsets)
        pooled = self._fit(sets)
        return self._weighted(self._pooled(sets) if pooled is None else pooled)

    def _can_invert(self) -> bool:
        if self.by == "sliced":
            raise AttributeError("Slices cannot be turned back into points; use by='both', 'step', 'free' or 'flow'.")
        return True

    @available_if(_can_invert)
    def inverse_transform(self, X: ArrayLike, *, return_masses: bool = False) -> Any:
        """The pooled points, ``(B, M, D)``, in the coordinates of the sets; with their masses ``(B, M)`` if asked for."""
        check_is_fitted(self)
        vectors = check_array(X, dtype=[np.float64, np.float32])
        if vectors.shape[1] != self._n_features_out:
            raise ValueError(
                f"X has {vectors.shape[1]} columns; vectors of this estimator have {self._n_features_out}."
            )
        num_points, dim = self._num_points, len(self.mean_)
        shares = np.full((len(vectors), num_points), 1 / num_points, vectors.dtype)
        if self.by == "free":
            roots, vectors = vectors[:, :num_points] / math.sqrt(self._unit), vectors[:, num_points:]
            shares = roots**2
        points = vectors[:, : num_points * dim].reshape(-1, num_points, dim)
        if self.by == "free":
            filled = np.where(roots > 0, roots, 1)[:, :, None]
            points = points / filled + self.reference_
        else:
            points = points * math.sqrt((2 if self.by == "both" else 1) * num_points)
        points = (points * self.scale_ + self.mean_).astype(vectors.dtype)
        return (points, shares) if return_masses else points

    def get_feature_names_out(self, input_features: ArrayLike | None = None) -> NDArray[np.object_]:
        """Names of the columns: ``point3_x0``, ``deviation3_x0``, ``point3_slice5``, ``share3``, ``log_size``."""
        check_is_fitted(self)
        return np.asarray(self._names(_check_feature_names_in(self, input_features)), dtype=object)

    def _names(self, features: Iterable[str]) -> list[str]:
        slices = [f"slice{number}" for number in range(NUM_SLICES)]
        if self.by == "sliced":
            features = slices
        numbers = range(self._num_points)
        names = [f"share{number}" for number in numbers] if self.by == "free" else []
        names += [f"point{number}_{feature}" for number in numbers for feature in features]
        if self._has_deviations:
            names += [f"deviation{number}_{feature}" for number in numbers for feature in features]
        if self.by == "both":
            names += [f"point{number}_{feature}" for number in range(self.num_points) for feature in slices]
        if self.size is not None:
            names.append("log_size" if self.size == "log" else "size")
        return names

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    @property
    def _has_deviations(self) -> bool:
        return bool(self.spread) and self.by != "flow"

    @property
    def _num_points(self) -> int:
        return self.num_points if self.reference_ is None else len(self.reference_)

    @property
    def _n_features_out(self) -> int:
        return len(self._names([""] * len(self.mean_)))

    def _check_choices(self) -> None:
        if self.by == "flow" and not self.spread:
            raise ValueError("by='flow' has no deviations to leave out; leave spread=True.")
        if self.by == "sliced" and not isinstance(self.reference, str):
            raise ValueError("by='sliced' has no reference; leave reference='kmeans'.")

    def _fit(self, sets: Sets) -> Floats | None:
        """Fits to the sets; what they were pooled to, if that was needed."""
        self.n_features_in_ = sets.members.shape[1]
        random = check_random_state(self.random_state)
        # In parts, for the memory of large data. Every set counts the same, however large.
        parts = list(sets.parts(max(1, _ENTRIES_AT_ONCE // self.n_features_in_)))
        mean = np.sum([part.masses @ part.members.astype(np.float64) for part in parts], axis=0) / len(sets)
        if self.standardize:
            deviation = np.sqrt(
                np.sum([part.masses @ (part.members - mean) ** 2 for part in parts], axis=0) / len(sets)
            )
            # Rounding leaves a little of a constant feature, which must not be blown up.
            constant = deviation <= 1e-12 * np.abs(mean)
            self.mean_, self.scale_ = mean, np.where(constant, 1.0, deviation)
        else:
            self.mean_, self.scale_ = np.zeros_like(mean), np.ones_like(mean)
        middle = (mean - self.mean_) / self.scale_
        squares = np.array([_mean_squares(part, (part.members - self.mean_) / self.scale_ - middle) for part in parts])
        squares = squares.sum(0) / len(sets)
        rounding = _EQUAL * (squares[0] + ((mean / self.scale_) ** 2).sum())
        total, self.variance_ = (float(square) if square > rounding else 0.0 for square in squares)
        # In which epsilon and shares are measured. Where each set is one place, what is between the sets tells the scale.
        self._unit = self.variance_ or total or 1.0
        self.reference_: Any = None
        if self.by != "sliced":
            unit = math.sqrt(max(total, np.finfo(float).tiny)) if self.by == "flow" else 1.0
            reference = self._centres(sets, random, middle, unit)
            self.reference_ = reference + (0 if self.by == "flow" else middle)
        if self.by in ("both", "sliced"):
            self.directions_ = _directions(self.n_features_in_, random)
        if self.by != "both":
            return None
        pooled = self._pooled(sets)
        self.balance_ = self._balance(pooled)
        return pooled

    @property
    def _on_lines(self) -> slice:
        """The columns of slices, after those of shares in space."""
        first = self._num_points * len(self.mean_) * (2 if self.spread else 1)
        return slice(first, first + self.num_points * NUM_SLICES)

    def _balance(self, vectors: Floats) -> float:
        """The ratio by which the mean square between training sets differs in space and on lines."""
        variances, lines = vectors.var(axis=0, dtype=np.float64), self._on_lines
        in_space, on_lines = variances[: lines.start].sum(), variances[lines].sum()
        # Sets that are all the same say nothing, and neither does the rounding by which they differ.
        return math.sqrt(in_space / on_lines) if min(in_space, on_lines) > _ROUNDING * self._unit else 1.0

    def _weighted(self, vectors: Floats) -> Floats:
        """Both halves with the weight that was fitted."""
        if self.by == "both":
            vectors[:, self._on_lines] *= self.balance_
        return vectors

    def _centres(self, sets: Sets, random: np.random.RandomState, middle: Floats, unit: float) -> NDArray[np.float64]:
        """The reference around the middle of the training sets, ``(M, D)``, in a unit of length."""
        if not isinstance(self.reference, str):
            reference = check_array(self.reference, dtype=np.float64, input_name="reference")
            if reference.shape != (self.num_points, self.n_features_in_):
                raise ValueError(
                    f"reference has shape {reference.shape}; expected ({self.num_points}, {self.n_features_in_}), "
                    "num_points and the features of the sets."
                )
            given: NDArray[np.float64] = ((reference - self.mean_) / self.scale_ - middle) / unit
            return given
        masses = sets.masses / len(sets)
        present = np.flatnonzero(masses > 0)
        if len(present) > _MEMBERS_FOR_KMEANS:
            present = random.choice(present, _MEMBERS_FOR_KMEANS, replace=False)
        members = (sets.members[present] - self.mean_) / self.scale_ - middle
        kmeans = KMeans(_num_distinct(members, self.num_points), n_init=3, random_state=random)
        kmeans.fit(members, sample_weight=masses[present] * len(present))
        centres: NDArray[np.float64] = kmeans.cluster_centers_ / unit
        return centres

    def _pooled(self, sets: Sets) -> Floats:
        """One row per set; slices have the weight with which they bound W_2 from below."""
        if sets.members.shape[1] != len(self.mean_):
            raise ValueError(
                f"X has {sets.members.shape[1]} features, but {type(self).__name__} is expecting "
                f"{len(self.mean_)} features as input."
            )
        rows = max(1, _ENTRIES_AT_ONCE // (self._num_points * (len(self.mean_) + 1)))
        ways = {"both": self._both, "step": self._step, "free": self._free, "flow": self._flow, "sliced": self._sliced}
        pool = ways[self.by]
        vectors = np.empty((len(sets), self._n_features_out), sets.members.dtype)
        first = 0
        for part in sets.parts(rows):
            scaled = part.with_members((part.members - self.mean_) / self.scale_)  # float64
            last = first + len(part)
            columns = pool(scaled)
            if self.size is not None:
                columns.append(np.log(part.totals) if self.size == "log" else part.totals)
            vectors[first:last] = np.concatenate([column.reshape(len(part), -1) for column in columns], axis=1)
            first = last
        return vectors

    def _received(self, sets: Sets) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Shares ``(B, M)``, means ``(B, M, D)`` and standard deviations of what each point received."""
        received = transport_pool(
            torch.from_numpy(sets.members),
            ptr=torch.from_numpy(sets.ptr),
            reference=torch.from_numpy(self.reference_),
            epsilon=self.epsilon * self._unit,
            relative=False,
            free=self.by == "free",
            masses=None if sets.weights is None else torch.from_numpy(sets.weights),
        )
        return received.masses.numpy(), received.points.numpy(), received.deviations.numpy()

    def _step(self, sets: Sets) -> list[NDArray[np.float64]]:
        _, points, deviations = self._received(sets)
        root = math.sqrt(self._num_points)
        return [points / root, deviations / root] if self.spread else [points / root]

    def _free(self, sets: Sets) -> list[NDArray[np.float64]]:
        # Weighted by the roots of the shares, as the equal ones are above: a point that got nothing says nothing.
        shares, points, deviations = self._received(sets)
        roots = np.sqrt(shares)
        moved = roots[:, :, None] * (points - self.reference_)
        columns = [math.sqrt(self._unit) * roots, moved]
        return [*columns, roots[:, :, None] * deviations] if self.spread else columns

    def _flow(self, sets: Sets) -> list[NDArray[np.float64]]:
        pooled = flow_pool(
            torch.from_numpy(sets.members),
            ptr=torch.from_numpy(sets.ptr),
            reference=torch.from_numpy(self.reference_),
            epsilon=self.epsilon,
            masses=None if sets.weights is None else torch.from_numpy(sets.weights),
            gradient="none",
            on_failure="ignore",
        )
        if not bool(pooled.converged.all()):
            missed = int((~pooled.converged).sum())
            message = (
                f"{missed} of {len(sets)} sets are not pooled to the tolerance. Ask for fewer points than members."
            )
            warnings.warn(message, ConvergenceWarning, stacklevel=2)
        return [pooled.points.numpy() / math.sqrt(self._num_points)]

    def _both(self, sets: Sets) -> list[NDArray[np.float64]]:
        points, _ = self._lines(sets)
        return [column / math.sqrt(2) for column in (*self._step(sets), points)]

    def _sliced(self, sets: Sets) -> list[NDArray[np.float64]]:
        points, deviations = self._lines(sets)
        return [points, deviations] if self.spread else [points]

    def _lines(self, sets: Sets) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Means and standard deviations of equal shares on every line, ``(B, M, L)`` each, in units of W_2."""
        points, variances = shares_on_lines(sets, self.directions_, self.num_points)
        # The mean over random directions of a squared projection is a D-th of the squared length.
        unit = math.sqrt(len(self.mean_) / (NUM_SLICES * self.num_points))
        return unit * points, unit * np.sqrt(variances)


def _mean_squares(sets: Sets, members: NDArray[np.float64]) -> tuple[float, float]:
    """Mean squares of scaled members around zero and around the mean of their set, summed over the sets."""
    centres = sets.sum(sets.masses[:, None] * members)  # (B, D)
    inside = members - np.repeat(centres, np.diff(sets.ptr), axis=0)
    return float(sets.masses @ (members**2).sum(1)), float(sets.masses @ (inside**2).sum(1))


def _directions(dim: int, random: np.random.RandomState) -> NDArray[np.float64]:
    """Unit vectors ``(D, L)`` from random orthonormal bases, each of which measures squared lengths without error."""
    drawn = random.standard_normal((-(-NUM_SLICES // dim), dim, min(dim, NUM_SLICES)))
    directions: NDArray[np.float64] = np.concatenate(list(np.linalg.qr(drawn).Q), axis=1)[:, :NUM_SLICES]
    return directions


def _num_distinct(members: Floats, most: int) -> int:
    """How many different members there are, counted up to ``most``.

    Members that differ in the last digits only are one; k-means would place several centres on them.
    """
    found, left = 0, (members / (np.abs(members).max() or 1.0)).astype(np.float32)
    while len(left) and found < most:
        found, left = found + 1, left[(left != left[0]).any(axis=1)]
    return found


def shares_on_lines(
    sets: Sets, directions: NDArray[np.float64], num_shares: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Means and variances of M equal shares of each set on each of L lines, from the lowest to the highest.

    On a line, optimal transport to M points keeps the order; their shares are those between the quantiles i/M.

    Args:
        sets: what is projected.
        directions: of the lines, ``(D, L)``.
        num_shares: M.

    Returns:
        Two arrays ``(B, M, L)``.
    """
    means = np.empty((len(sets), num_shares, directions.shape[1]))
    variances = np.empty_like(means)
    for number in range(len(sets)):
        one = sets.part(number, number + 1)
        masses, values = one.masses, one.members @ directions  # (N,), (N, L)
        centre = masses @ values  # taken off, because squares of offsets would cancel
        values -= centre
        lines = max(1, _ENTRIES_AT_ONCE // len(one.members))  # so many at a time, for the memory of large sets
        for first in range(0, directions.shape[1], lines):
            some = slice(first, first + lines)
            means[number, :, some], variances[number, :, some] = _shares(values[:, some], masses, num_shares)
        means[number] += centre
    return means, variances


def _shares(
    values: NDArray[np.float64], masses: NDArray[np.float64], num_shares: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The same for one set with places ``(N, L)`` around zero and masses ``(N,)``: two arrays ``(M, L)``."""
    order = values.argsort(axis=0, kind="stable")
    place, mass = np.take_along_axis(values, order, 0), masses[order]
    reached, moments = mass.cumsum(0), ((mass * place).cumsum(0), (mass * place**2).cumsum(0))
    cut = np.arange(1, num_shares + 1)[:, None] / num_shares  # (M, 1)
    # The member in which a share ends, and how much of it is beyond.
    last = np.minimum([(reached < level).sum(0) for level in cut[:, 0]], len(values) - 1)  # (M, L)
    beyond, end = np.take_along_axis(reached, last, 0) - cut, np.take_along_axis(place, last, 0)
    below = [np.take_along_axis(sums, last, 0) - beyond * end**power for power, sums in enumerate(moments, 1)]
    mean, square = (num_shares * np.diff(sums, axis=0, prepend=0) for sums in below)
    variance = square - mean**2
    # What is left of equal members is their rounding.
    return mean, np.where(variance > _ROUNDING * moments[1][-1], variance, 0)
