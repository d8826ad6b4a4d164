r"""Wasserstein distances between clouds of points, and the kernel that is made of them."""

from __future__ import annotations

from numbers import Real
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin, _fit_context
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils._tags import Tags

from flowpool.core.constants import PIVOTS
from flowpool.sklearn.fitted import Fitted
from flowpool.sklearn.sets import Sets, read_sets, shown

_ENTRIES_AT_ONCE = 2**22  # numbers per temporary array: 32 MB


def wasserstein_distances(
    clouds_a: Any,
    clouds_b: Any = None,
    *,
    masses_a: Any = None,
    masses_b: Any = None,
    verbose: bool = False,
) -> NDArray[np.float64]:
    r"""W_2 between every cloud of one list and every cloud of another, without regularisation.

    .. math:: W_2^2(X, Y) = \min_{P \in U(a, b)} \sum_{ij} P_{ij} |x_i - y_j|^2

    Args:
        clouds_a: A clouds ``(N_i, D)``: an array ``(A, M, D)``, as from ``FlowVectorizer.inverse_transform``, or a list.
        clouds_b: B others; None: the same, each pair computed once.
        masses_a, masses_b: of the points, one array per cloud; None: equal. Normalised per cloud.
        verbose: show on stderr how far it is.

    Returns:
        ``(A, B)``. Clouds of as many points of equal mass are matched by an assignment; other pairs are solved by POT.
    """
    first = read_sets(clouds_a, masses_a)
    if clouds_b is None and masses_b is not None:
        raise ValueError("masses_b belong to clouds_b, which is None.")
    second = first if clouds_b is None else read_sets(clouds_b, masses_b)
    if first.members.shape[1] != second.members.shape[1]:
        raise ValueError(f"The clouds have {first.members.shape[1]} and {second.members.shape[1]} features.")
    squares = np.zeros((len(first), len(second)))
    for row, cloud in enumerate(shown(first.parts(1), len(first), "Wasserstein distances", verbose)):
        start = row + 1 if clouds_b is None else 0
        if start < len(second):
            squares[row, start:] = _squares(cloud, second.part(start, len(second)))
    if clouds_b is None:
        squares += squares.T
    distances: NDArray[np.float64] = np.sqrt(squares)
    return distances


class WassersteinKernel(ClassNamePrefixFeaturesOutMixin, TransformerMixin, Fitted):
    r"""Kernel values between clouds, for estimators with ``kernel="precomputed"``.

    .. math:: k(X, Y) = \exp(-\gamma \, W_2(X, Y))

    On all nodes this is the kernel of Togninalli et al. (2019), with W_2 for their W_1; on the M points of pooled clouds
    it costs a fraction of that.

    Args:
        gamma: a number, or ``"median"``: one over the median distance between training clouds.
        verbose: show on stderr how far it is.

    Attributes:
        clouds_: the training clouds.
        gamma_: the number that is used.

    >>> import numpy as np
    >>> from flowpool.sklearn import WassersteinKernel
    >>> clouds = np.array([[[0.0], [1.0]], [[0.0], [3.0]]])
    >>> WassersteinKernel(1.0).fit_transform(clouds).round(3)
    array([[1.   , 0.243],
           [0.243, 1.   ]])
    """

    _parameter_constraints: dict[str, list[Any]] = {  # noqa: RUF012 - as scikit-learn declares them
        "gamma": [StrOptions({"median"}), Interval(Real, 0, None, closed="neither")],
        "verbose": ["boolean"],
    }

    def __init__(self, gamma: float | Literal["median"] = "median", *, verbose: bool = False) -> None:
        self.gamma = gamma
        self.verbose = verbose

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Keeps the training clouds; ``sample_weight`` holds the masses of the points of each, None if they are equal."""
        distances = np.zeros((0, 0))
        if isinstance(self.gamma, str):
            distances = wasserstein_distances(X, masses_a=sample_weight, verbose=self.verbose)
        return self._keep(X, sample_weight, distances)

    def transform(self, X: Any, sample_weight: Any = None) -> NDArray[np.float64]:
        """``(B, num_training_clouds)``."""
        self._check_fitted()
        distances = wasserstein_distances(
            X, self.clouds_, masses_a=sample_weight, masses_b=self._masses, verbose=self.verbose
        )
        return np.exp(-self.gamma_ * distances)

    @_fit_context(prefer_skip_nested_validation=True)
    def fit_transform(self, X: Any, y: Any = None, sample_weight: Any = None) -> NDArray[np.float64]:
        """Kernel values between the training clouds, each pair computed once."""
        distances = wasserstein_distances(X, masses_a=sample_weight, verbose=self.verbose)
        self._keep(X, sample_weight, distances)
        return np.exp(-self.gamma_ * distances)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.three_d_array = True
        return tags

    def _keep(self, clouds: Any, masses: Any, distances: NDArray[np.float64]) -> Self:
        sets = read_sets(clouds, masses)
        self.clouds_ = sets.arrays()
        self._masses = None if sets.weights is None else np.split(sets.weights, sets.ptr[1:-1])
        self.n_features_in_ = sets.members.shape[1]
        self._n_features_out = len(sets)
        if isinstance(self.gamma, str):
            between = distances[np.triu_indices(len(distances), 1)]
            median = float(np.median(between)) if between.size else 0.0
            self.gamma_ = 1 / median if median > 0 else 1.0
        else:
            self.gamma_ = float(self.gamma)
        self._note_parameters()
        return self


def _squares(cloud: Sets, others: Sets) -> NDArray[np.float64]:
    """W_2^2 between one cloud and each of B others, ``(B,)``."""
    size = len(cloud.members)
    squares = np.empty(len(others))
    first = 0
    for part in others.parts(max(1, _ENTRIES_AT_ONCE // size)):
        # Not by products: a difference of squares would lose the distance of clouds that are far from all others.
        costs = cdist(cloud.members, part.members, "sqeuclidean")  # (M, N)
        masses, own = part.masses, cloud.masses
        for place in range(len(part)):
            members = slice(part.ptr[place], part.ptr[place + 1])
            squares[first + place] = _transport_cost(costs[:, members], own, masses[members])
        first += len(part)
    return squares


def _transport_cost(costs: NDArray[np.float64], masses_a: NDArray[np.float64], masses_b: NDArray[np.float64]) -> float:
    equal = len(masses_a) == len(masses_b) and bool((masses_a == masses_a[0]).all() and (masses_b == masses_b[0]).all())
    if equal:
        return float(costs[linear_sum_assignment(costs)].mean())
    if len(masses_a) == 1 or len(masses_b) == 1:
        return float(masses_a @ costs @ masses_b)
    try:
        import ot
    except ImportError as error:
        raise ImportError("Clouds of different sizes or masses need POT: pip install 'flowpool[sklearn]'.") from error
    unit = float(costs.max()) or 1.0  # POT takes what is below some absolute size for nothing
    return unit * float(ot.emd2(masses_a, masses_b, np.ascontiguousarray(costs / unit), numItermax=PIVOTS))
