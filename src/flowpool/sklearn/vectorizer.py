r"""Sets as vectors whose Euclidean distance is close to the Wasserstein distance between the sets.

All sets are sent to the same M reference points, each of which receives 1/M of every set. A set becomes the mean and
the standard deviations of what each point received, scaled so that the distance of two such vectors approximates W_2;
docs/vectorizer.md has the derivation.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, Literal, Self

import numpy as np
import torch
from joblib import Parallel, delayed
from numpy.typing import ArrayLike, NDArray
from scipy.fft import dct, idct
from sklearn.base import TransformerMixin, _fit_context
from sklearn.cluster import KMeans
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils._tags import Tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import _check_feature_names_in, check_array

from flowpool.sklearn.fitted import Fitted
from flowpool.sklearn.sets import Floats, Sets, read_sets, shown
from flowpool.step.pool import transport_pool

_SIZE_SHARE = 0.1  # of the columns of size in the mean squared distance of training sets, relative to all others
_ENTRIES_AT_ONCE = 2**22  # numbers per temporary array: 32 MB of float64
_ROUNDING = 1e-20  # of a mean square, below which a variance is none
_EQUAL = 1e-24  # of the mean square of all members, below which a variance is rounding
_MEMBERS_FOR_KMEANS = 50_000  # more do not move the centres visibly


class FlowVectorizer(TransformerMixin, Fitted):
    r"""Turns sets of vectors, of any sizes, into vectors of one length.

    The means :math:`\hat x_i` and standard deviations :math:`\sigma_i` of what M shared reference points receive of a
    set, in equal shares, by one entropic transport, less their mean over the training sets, and turned:

    .. math:: v = Q \Bigl( \tfrac1{\sqrt M} (\hat x_1, \dots, \hat x_M, \sigma_1, \dots, \sigma_M) - \bar v \Bigr),
              \qquad |v - v'| \approx W_2(Y, Y')

    The rotation Q keeps all distances and gives every column a part of everything. So all of them vary about as
    much, and it matters little whether they are standardised afterwards, which would else blow up the shares of rare labels
    and the tails of a blurred plan. ``inverse_transform`` turns back.

    Args:
        num_points: M; fewer where the training sets have fewer distinct members.
        by: ``"step"``: equal shares, as above. ``"free"``: each point receives what is near it, and the vector says how
            much: a soft histogram, for classifying sets rather than for distances.
        reference: ``"kmeans"``: centres of the members of the training sets; or an array ``(M, D)``.
        epsilon: entropic regularisation, in units of the mean variance (summed over features) inside a training set, or
            of that between them where each is one place.
        size: how the vector says how large a set is, which its distribution forgets. ``"log"``: the logarithm of the
            number of members, or of their total weight. ``"sums"``: that number, and the sums of the members, for
            targets that grow with them. None: nothing, and only then distances approximate W_2; else sizes have a
            tenth of the mean square of the rest.
        standardize: divide each feature by its standard deviation over the training sets first, for features in
            different units.
        random_state: of k-means and of the rotation.
        n_jobs: how many parts of the sets are pooled at a time, as in scikit-learn: None: one, -1: one per processor. The
            kernels use torch's threads for each.
        verbose: show on stderr how far it is.

    Attributes:
        reference_: ``(M, D)``.
        mean_, scale_: of each feature over the training sets, all sets counting the same, ``(D,)``; zeros and ones
            unless ``standardize``.
        variance_: mean variance inside a training set, summed over features.
        weights_, center_: before the rotation, what the columns are multiplied by, and what is then taken off.
        n_features_in_: D.

    Fitting and transforming take a list of arrays ``(N_i, D)``, a list of objects that have one as ``x`` (PyTorch
    Geometric's ``Data``), an array ``(B, N, D)``, or one stacked array ``(N, D)`` with ``groups`` or ``offsets``.

    >>> import numpy as np
    >>> from flowpool.sklearn import FlowVectorizer
    >>> random = np.random.default_rng(0)
    >>> sets = [random.normal(size=(size, 3)) for size in (20, 35, 50)]
    >>> FlowVectorizer(4).fit_transform(sets).shape
    (3, 25)
    """

    _parameter_constraints: dict[str, list[Any]] = {  # noqa: RUF012 - as scikit-learn declares them
        "num_points": [Interval(Integral, 1, None, closed="left")],
        "by": [StrOptions({"step", "free"})],
        "reference": [StrOptions({"kmeans"}), "array-like"],
        "epsilon": [Interval(Real, 0, None, closed="neither")],
        "size": [StrOptions({"log", "sums"}), None],
        "standardize": ["boolean"],
        "random_state": ["random_state"],
        "n_jobs": [Integral, None],
        "verbose": ["verbose"],
    }

    def __init__(
        self,
        num_points: int = 32,
        *,
        by: Literal["step", "free"] = "step",
        reference: Literal["kmeans"] | ArrayLike = "kmeans",
        epsilon: float = 0.03,
        size: Literal["log", "sums"] | None = "log",
        standardize: bool = False,
        random_state: int | np.random.RandomState | None = None,
        n_jobs: int | None = None,
        verbose: bool = False,
    ) -> None:
        self.num_points = num_points
        self.by = by
        self.reference = reference
        self.epsilon = epsilon
        self.size = size
        self.standardize = standardize
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.verbose = verbose

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
        """Fits scale, reference and weights to training sets.

        Args:
            X: the sets; see the class.
            y: not used.
            sample_weight: weights of the members: one array ``(N_i,)`` per set, or ``(N,)`` for a stacked array.
            groups: set of each row of a stacked array, ``(N,)``; sets are returned in the order of their sorted numbers.
            offsets: or where each set begins in it, and the end, ``(B + 1,)``.
        """
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
        self._check_fitted()
        sets = read_sets(X, sample_weight, groups=groups, offsets=offsets)
        if sets.members.shape[1] != len(self.mean_):
            raise ValueError(
                f"X has {sets.members.shape[1]} features, but {type(self).__name__} is expecting "
                f"{len(self.mean_)} features as input."
            )
        return self._turned(self._pooled(sets) * self.weights_ - self.center_, sets)

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
        sets = read_sets(X, sample_weight, groups=groups, offsets=offsets)
        return self._turned(self._fit(sets), sets)

    def _has_shares(self) -> bool:
        if self.by == "free":
            raise AttributeError("A soft histogram is not turned back into points; use by='step'.")
        return True

    @available_if(_has_shares)
    def inverse_transform(self, X: ArrayLike) -> tuple[Floats, Floats]:
        """Means and standard deviations of what each point received, ``(B, M, D)`` each, in the coordinates of the sets."""
        self._check_fitted()
        vectors = check_array(X, dtype=[np.float64, np.float32])
        if vectors.shape[1] != len(self.weights_):
            raise ValueError(f"X has {vectors.shape[1]} columns; vectors of this estimator have {len(self.weights_)}.")
        columns = (idct(vectors.astype(np.float64), norm="ortho") * self._signs + self.center_) / self.weights_
        shape = (len(vectors), 2, *self.reference_.shape)
        shares = columns[:, : 2 * self.reference_.size].reshape(shape)
        points, deviations = shares.swapaxes(0, 1) * self.scale_
        return (points + self.mean_).astype(vectors.dtype), deviations.astype(vectors.dtype)

    def get_feature_names_out(self, input_features: ArrayLike | None = None) -> NDArray[np.object_]:
        """Names of the columns, ``flowvectorizer0`` and so on: mixtures have no meaning of their own."""
        self._check_fitted()
        _check_feature_names_in(self, input_features)
        return np.asarray([f"flowvectorizer{number}" for number in range(len(self._signs))], dtype=object)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def _fit(self, sets: Sets) -> NDArray[np.float64]:
        """Fits to the sets; what they were pooled to."""
        random = check_random_state(self.random_state)
        self._fit_features(sets, random)
        vectors = self._pooled(sets)  # (B, K)
        self._signs = random.choice([-1.0, 1.0], vectors.shape[1])
        self.weights_ = self._balanced(vectors)
        vectors *= self.weights_
        self.center_ = vectors.mean(0)
        vectors -= self.center_
        self._note_parameters()
        return vectors

    def _fit_features(self, sets: Sets, random: np.random.RandomState) -> None:
        """Fits what sets are measured by, and the reference."""
        self.n_features_in_ = sets.members.shape[1]
        # In parts, for the memory of large data. Every set counts the same, however large.
        parts = list(sets.parts(max(1, _ENTRIES_AT_ONCE // self.n_features_in_)))
        mean = np.sum([part.masses @ part.members.astype(np.float64) for part in parts], axis=0) / len(sets)
        squares = np.sum([_squares(part, mean) for part in parts], axis=0) / len(sets)  # (2, D)
        deviations = np.sqrt(squares[0])
        if self.standardize:
            # Rounding leaves a little of a constant feature, which must not be blown up.
            self.mean_, self.scale_ = mean, np.where(deviations <= 1e-12 * np.abs(mean), 1.0, deviations)
        else:
            self.mean_, self.scale_ = np.zeros_like(mean), np.ones_like(mean)
        total, within = (squares / self.scale_**2).sum(1)
        rounding = _EQUAL * (total + ((mean / self.scale_) ** 2).sum())
        self.variance_ = float(within) if within > rounding else 0.0
        # In which epsilon is measured. Where each set is one place, what is between the sets tells the scale.
        self._unit = self.variance_ or (float(total) if total > rounding else 1.0)
        self.reference_ = self._chosen_reference(sets, random)

    def _chosen_reference(self, sets: Sets, random: np.random.RandomState) -> NDArray[np.float64]:
        if isinstance(self.reference, str):
            return centres_of(sets, self.num_points, random, self.mean_, self.scale_)
        reference = check_array(self.reference, dtype=np.float64, input_name="reference")
        if reference.shape != (self.num_points, self.n_features_in_):
            raise ValueError(
                f"reference has shape {reference.shape}; expected ({self.num_points}, {self.n_features_in_}), "
                "num_points and the features of the sets."
            )
        given: NDArray[np.float64] = (reference - self.mean_) / self.scale_
        return given

    def _pooled(self, sets: Sets) -> NDArray[np.float64]:
        """One row per set, without weights, ``(B, K)``."""
        rows = max(1, _ENTRIES_AT_ONCE // (self.num_points * (len(self.mean_) + 1)))
        parts = list(sets.parts(rows))
        pool = Parallel(self.n_jobs, prefer="threads", return_as="generator")
        pooled = pool(delayed(self._pooled_part)(part) for part in parts)
        return np.concatenate(list(shown(pooled, len(parts), "Sets", self.verbose)))

    def _pooled_part(self, sets: Sets) -> NDArray[np.float64]:
        scaled = sets.with_members((sets.members - self.mean_) / self.scale_)  # float64
        received = transport_pool(
            torch.from_numpy(scaled.members),
            ptr=torch.from_numpy(scaled.ptr),
            reference=torch.from_numpy(self.reference_),
            epsilon=self.epsilon * self._unit,
            relative=False,
            free=self.by == "free",
            masses=None if sets.weights is None else torch.from_numpy(sets.weights),
        )
        columns = [received.points.numpy(), received.deviations.numpy()]
        if self.by == "free":
            # Weighted by the roots of the shares, which equal ones are too: a point that got nothing says nothing.
            roots = received.masses.sqrt().numpy()
            moved = roots[:, :, None] * (columns[0] - self.reference_)
            columns = [moved, roots[:, :, None] * columns[1], math.sqrt(self._unit) * roots]
        if self.size is not None:
            totals = scaled.totals
            columns.append(np.log(totals) if self.size == "log" else totals)
            if self.size == "sums":
                columns.append(totals[:, None] * scaled.sum(scaled.masses[:, None] * scaled.members))
        return np.concatenate([column.reshape(len(sets), -1) for column in columns], axis=1)

    def _balanced(self, vectors: NDArray[np.float64]) -> NDArray[np.float64]:
        """What columns are multiplied by, so that sizes have their share of the mean square between training sets."""
        weights = np.ones(vectors.shape[1])
        width = len(weights) - {"log": 1, "sums": 1 + len(self.mean_)}.get(self.size or "", 0)
        shapes, sizes = slice(width), slice(width, None)
        if self.by == "step":
            weights[shapes] = 1 / math.sqrt(len(self.reference_))
        variances, squares = vectors.var(0) * weights**2, (vectors**2).mean(0) * weights**2
        between, of_sizes = variances[shapes].sum(), variances[sizes].sum()
        # Rounding by which equal sets differ is nothing to be measured by.
        if between > _ROUNDING * squares[shapes].sum() and of_sizes > _ROUNDING * squares[sizes].sum():
            weights[sizes] = math.sqrt(_SIZE_SHARE * between / of_sizes)
        return weights

    def _turned(self, vectors: NDArray[np.float64], sets: Sets) -> Floats:
        """The vectors rotated: random signs, then a cosine transform."""
        turned: Floats = dct(vectors * self._signs, norm="ortho").astype(sets.members.dtype)
        return turned


def _squares(sets: Sets, mean: Floats) -> NDArray[np.float64]:
    """Mean squares of each feature around a place and around the mean of each set, summed over the sets, ``(2, D)``."""
    centred = sets.members - mean
    within = centred - np.repeat(sets.sum(sets.masses[:, None] * centred), np.diff(sets.ptr), axis=0)
    return np.stack([sets.masses @ centred**2, sets.masses @ within**2])


def centres_of(
    sets: Sets, num_points: int, random: np.random.RandomState, mean: Any = 0.0, scale: Any = 1.0
) -> NDArray[np.float64]:
    """K-means centres of the members, less a mean and over a scale, all sets counting the same; ``(M, D)`` or fewer."""
    masses = sets.masses / len(sets)
    present = np.flatnonzero(masses > 0)
    if len(present) > _MEMBERS_FOR_KMEANS:
        present = random.choice(present, _MEMBERS_FOR_KMEANS, replace=False)
    members = (sets.members[present] - mean) / scale
    middle = members.mean(0)  # taken off, because squares of offsets would cancel
    members -= middle
    kmeans = KMeans(_num_distinct(members, num_points), n_init=3, random_state=random)
    kmeans.fit(members, sample_weight=masses[present] * len(present))
    centres: NDArray[np.float64] = kmeans.cluster_centers_ + middle
    return centres


def _num_distinct(members: Floats, most: int) -> int:
    """How many different members there are, counted up to ``most``.

    Members that differ in the last digits only are one; k-means would place several centres on them.
    """
    found, left = 0, (members / (np.abs(members).max() or 1.0)).astype(np.float32)
    while len(left) and found < most:
        found, left = found + 1, left[(left != left[0]).any(axis=1)]
    return found
