"""Sets and graphs in scikit-learn: values against closed forms and other solvers, and scikit-learn's own checks."""

from __future__ import annotations

import math
import pickle
import tracemalloc
from types import SimpleNamespace

import numpy as np
import ot
import pytest
import sklearn
import torch
from scipy.spatial.distance import pdist
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.validation import _check_feature_names_in, check_is_fitted, validate_data
from torch_geometric.data import Batch, Data

from flowpool.sklearn import FlowVectorizer, Propagate, WassersteinKernel, wasserstein_distances
from flowpool.sklearn.sets import read_sets

WAYS = ["step", "free"]


def draw(
    count: int = 12, dim: int = 3, seed: int = 0, smallest: int = 12, dtype: type = np.float64
) -> list[np.ndarray]:
    """Sets of different sizes, places and shapes."""
    random = np.random.default_rng(seed)
    sizes = random.integers(smallest, smallest + 20, count)
    stretches = random.uniform(0.3, 2, (count, dim))
    return [
        (random.normal(size=(n, dim)) * stretch + random.normal(size=dim)).astype(dtype)
        for n, stretch in zip(sizes, stretches, strict=True)
    ]


def draw_weights(sets: list[np.ndarray], seed: int = 1) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(1, 4, len(members)).astype(float) for members in sets]


class OnALine(FlowVectorizer):
    """Each row of a table as a cloud on a line, so that scikit-learn's checks, which pass tables, can be run."""

    def fit(self, X, y=None):  # noqa: N803
        table = validate_data(self, X, dtype=[np.float64, np.float32])
        super().fit(table[:, :, None])
        self.n_features_in_ = table.shape[1]
        return self

    def transform(self, X):  # noqa: N803
        check_is_fitted(self)
        return super().transform(validate_data(self, X, dtype=[np.float64, np.float32], reset=False)[:, :, None])

    def fit_transform(self, X, y=None):  # noqa: N803
        return self.fit(X).transform(X)

    def get_feature_names_out(self, input_features=None):
        _check_feature_names_in(self, input_features)
        return np.asarray([f"flowvectorizer{number}" for number in range(len(self._signs))], dtype=object)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = True
        return tags


@parametrize_with_checks([OnALine(2, by=by, random_state=0) for by in WAYS])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


# Values


def test_one_point_receives_everything():
    sets = draw()
    vectorizer = FlowVectorizer(1, size=None)
    vectors = vectorizer.fit_transform(sets)
    means, deviations = (np.stack([getattr(members, kind)(0) for members in sets]) for kind in ("mean", "std"))
    np.testing.assert_allclose(pdist(vectors), pdist(np.concatenate([means, deviations], axis=1)), atol=1e-10)
    points, spread = vectorizer.inverse_transform(vectors)
    np.testing.assert_allclose(points[:, 0], means, atol=1e-10)
    np.testing.assert_allclose(spread[:, 0], deviations, atol=1e-10)


def test_distances_of_moved_and_stretched_copies_are_exact():
    # One point, and sets that differ by a shift and a stretch along the axes: W_2 is that of Gaussians.
    base = draw(1, smallest=40)[0]
    base = (base - base.mean(0)) / base.std(0)
    sets = [base * stretch + shift for stretch, shift in (((1, 1, 1), (0, 0, 0)), ((2, 1, 0.5), (1, 0, -3)))]
    vectors = FlowVectorizer(1, by="step", size=None).fit_transform(sets)
    assert np.linalg.norm(vectors[0] - vectors[1]) == pytest.approx(math.sqrt(10 + 1 + 0.25), rel=1e-9)
    assert wasserstein_distances(sets)[0, 1] == pytest.approx(math.sqrt(10 + 1 + 0.25), rel=1e-6)


def test_points_of_a_small_epsilon_are_the_barycentres_of_exact_transport():
    sets = draw(smallest=24)
    reference = np.random.default_rng(5).normal(size=(4, 3))
    vectorizer = FlowVectorizer(4, by="step", reference=reference, epsilon=1e-4, size=None).fit(sets)
    points, _ = vectorizer.inverse_transform(vectorizer.transform(sets))
    for members, found in zip(sets, points, strict=True):
        plan = ot.emd(np.full(4, 1 / 4), np.full(len(members), 1 / len(members)), ot.dist(reference, members))
        np.testing.assert_allclose(found, 4 * plan @ members, atol=1e-2)


@pytest.mark.parametrize(("num_points", "error"), [(8, 0.08), (32, 0.03)])
def test_distances_are_close_to_exact_transport(num_points, error):
    sets = draw(30, smallest=30)
    exact = wasserstein_distances(sets)[np.triu_indices(30, 1)]
    found = pdist(FlowVectorizer(num_points, size=None, random_state=0).fit_transform(sets))
    assert np.corrcoef(exact, found)[0, 1] > 0.99
    assert np.mean(np.abs(found / exact - 1)) < error


@pytest.mark.parametrize("sets", [[np.eye(3)], [draw(1)[0], draw(1)[0] * (1 + 1e-14)], [np.ones((4, 2))] * 3])
def test_sets_that_do_not_differ_are_zero(sets):
    np.testing.assert_allclose(FlowVectorizer(2).fit_transform(sets), 0, atol=1e-12)


def test_free_points_count_what_is_near_them():
    reference = np.array([[0.0, 0.0], [100.0, 0.0], [0.0, 100.0]])
    sets = [np.array([[1.0, 0], [-1, 0], [0, 1], [101, 5]]), np.array([[99.0, 0], [101, 0]])]
    vectorizer = FlowVectorizer(3, by="free", reference=reference, epsilon=1e-3, size=None)
    one, other = vectorizer.fit_transform(sets)
    # Shares 3/4 and 1/4 at means (0, 1/3) and (1, 5) from the points, against all at the second point.
    shares = vectorizer.variance_ * (3 / 4 + (1 / 2 - 1) ** 2)
    means = (3 / 4) / 9 + (1 / 4) * (1 + 25)
    deviations = (3 / 4) * (2 / 3 + 2 / 9) + 1
    assert np.sum((one - other) ** 2) == pytest.approx(shares + means + deviations, rel=1e-9)
    assert not hasattr(vectorizer, "inverse_transform")


@pytest.mark.parametrize("by", WAYS)
def test_weights_are_repetitions_and_zero_is_absence(by):
    sets = draw(6)
    weights = draw_weights(sets)
    repeated = [np.repeat(members, own.astype(int), axis=0) for members, own in zip(sets, weights, strict=True)]
    vectorizer = FlowVectorizer(3, by=by, random_state=0).fit(repeated)
    expected = vectorizer.transform(repeated)
    np.testing.assert_allclose(vectorizer.transform(sets, sample_weight=weights), expected, atol=1e-4)
    more = [np.concatenate([members, [[50.0, 50, 50]]]) for members in sets]
    zero = [np.append(own, 0) for own in weights]
    np.testing.assert_allclose(vectorizer.transform(more, sample_weight=zero), expected, atol=1e-4)


def test_weights_are_repetitions_in_what_is_fitted():
    sets = draw(6)
    weights = draw_weights(sets)
    repeated = [np.repeat(members, own.astype(int), axis=0) for members, own in zip(sets, weights, strict=True)]
    one = FlowVectorizer(1, standardize=True).fit(sets, sample_weight=weights)
    other = FlowVectorizer(1, standardize=True).fit(repeated)
    for name in ("mean_", "scale_", "variance_", "reference_"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize("size", ["log", "sums"])
def test_sizes_come_last_and_are_a_tenth_of_the_mean_square(by, size):
    sets = draw()
    vectorizer = FlowVectorizer(2, by=by, size=size, random_state=0)
    vectors = vectorizer.fit_transform(sets)
    sizes = np.array([len(members) for members in sets])
    columns = (
        np.log(sizes)[:, None] if size == "log" else np.column_stack([sizes, [members.sum(0) for members in sets]])
    )
    shapes = FlowVectorizer(2, by=by, size=None, random_state=0).fit_transform(sets)
    columns = columns - columns.mean(0)
    columns *= math.sqrt(shapes.var(0).sum() / columns.var(0).sum() / 10)
    np.testing.assert_allclose(pdist(vectors), np.hypot(pdist(shapes), pdist(columns)), rtol=1e-7)
    heavy = [np.full(len(members), 2.0) for members in sets]
    assert np.linalg.norm(vectorizer.transform(sets, heavy)[0] - vectors[0]) > 0.01


@pytest.mark.parametrize("standardize", [False, True])
def test_the_mean_survives_the_way_there_and_back(standardize):
    sets = [members * [1, 10, 100] + [0, 0, 1000] for members in draw()]
    vectorizer = FlowVectorizer(4, standardize=standardize, random_state=0).fit(sets)
    means = vectorizer.inverse_transform(vectorizer.transform(sets))[0].mean(1)
    np.testing.assert_allclose(means, [members.mean(0) for members in sets], atol=2e-2)


def test_fitting_in_parts_is_fitting_at_once_without_copying_the_members(monkeypatch):
    random = np.random.default_rng(0)
    stacked = random.normal(size=(40_000, 32), loc=2).astype(np.float32)
    offsets = np.sort(random.choice(np.arange(1, 40_000), 399, replace=False))
    offsets = np.concatenate([[0], offsets, [40_000]])
    given = stacked[:8].astype(np.float64)
    make = FlowVectorizer(8, by="step", reference=given, standardize=True)
    whole = clone(make).fit(stacked, offsets=offsets)
    monkeypatch.setattr("flowpool.sklearn.vectorizer._ENTRIES_AT_ONCE", 2**15)
    tracemalloc.start()
    parts = clone(make).fit(stacked, offsets=offsets)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < stacked.nbytes
    for name in ("mean_", "scale_", "variance_", "reference_"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), rtol=1e-12)


def test_standardizing_is_standardizing_beforehand():
    sets = [members[:15] * [1, 10, 100] + [0, 5, 1000] for members in draw(smallest=15)]  # equal sizes
    scaler = StandardScaler().fit(np.concatenate(sets))
    one = FlowVectorizer(4, standardize=True, random_state=0).fit_transform(sets)
    other = FlowVectorizer(4, random_state=0).fit_transform([scaler.transform(members) for members in sets])
    np.testing.assert_allclose(one, other, atol=1e-6)


def test_the_reference_counts_every_set_the_same():
    heavy, light = np.full((900, 1), 10.0), np.array([[0.0]])
    assert FlowVectorizer(1).fit([heavy, light]).reference_ == pytest.approx(5.0)


def test_fewer_distinct_members_than_points_give_fewer_points():
    sets = [np.eye(3)[[0, 0, 1, 2]], np.eye(3)[[1, 2]]]
    vectorizer = FlowVectorizer(8, size=None).fit(sets)
    assert vectorizer.reference_.shape == (3, 3)
    assert vectorizer.transform(sets).shape == (2, 2 * 3 * 3)
    points, _ = vectorizer.inverse_transform(vectorizer.transform(sets))
    np.testing.assert_allclose(points.mean(1), [members.mean(0) for members in sets], atol=2e-2)


def test_sets_that_are_all_one_point_are_that_point():
    sets = [np.full((4, 2), 3.0), np.full((2, 2), 3.0)]
    vectorizer = FlowVectorizer(4, by="step", size=None).fit(sets)
    assert not vectorizer.transform(sets).any()
    np.testing.assert_allclose(vectorizer.inverse_transform(np.zeros((1, 4)))[0], [[[3, 3]]], atol=1e-12)


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize("size", [2.0**-160, 2.0**-20, 2.0**160])
def test_vectors_commute_with_scaling(by, size):
    sets = draw(6, dim=1)
    vectorizer = FlowVectorizer(4, by=by, size=None, random_state=0)
    vectors = vectorizer.fit_transform(sets)
    scaled = vectorizer.fit_transform([members * size for members in sets])
    np.testing.assert_allclose(scaled, vectors * size, rtol=1e-5, atol=1e-5 * size)


@pytest.mark.parametrize("by", WAYS)
def test_sets_of_one_member_have_no_scale_but_that_between_them(by):
    sets = [members[:1] / 3 for members in draw(6)]
    vectorizer = FlowVectorizer(4, by=by, size=None, random_state=0)
    vectors = vectorizer.fit_transform(sets)
    assert vectorizer.variance_ == 0
    small = vectorizer.fit_transform([place / 2**20 for place in sets])
    np.testing.assert_allclose(small * 2**20, vectors, rtol=1e-6, atol=1e-9)
    twins = vectorizer.fit_transform([np.repeat(place, 7, axis=0) for place in sets])
    assert vectorizer.variance_ == 0
    np.testing.assert_allclose(twins, vectors, rtol=1e-6, atol=1e-9)


# What may be done with the vectors


def label_sets(count: int = 40) -> list[np.ndarray]:
    """Sets of one-hot labels, the last of which are rare."""
    random = np.random.default_rng(0)
    shares = np.array([0.5, 0.3, 0.15, 0.04, 0.01])
    return [np.eye(5)[random.choice(5, size, p=shares)] for size in random.integers(10, 40, count)]


@pytest.mark.parametrize("by", WAYS)
def test_scaling_the_columns_blows_nothing_up(by):
    sets = label_sets()
    vectors = FlowVectorizer(5, by=by, size=None, random_state=0).fit_transform(sets)
    deviations = vectors.std(0)
    assert deviations.min() > deviations.max() / 10
    scaled = pdist(StandardScaler().fit_transform(vectors))
    assert np.corrcoef(scaled, pdist(vectors))[0, 1] > 0.95
    counts = np.array([members.sum(0) for members in sets])
    target = counts @ [1.0, -1, 2, 0, 0] / counts.sum(1)
    for steps in ((), (StandardScaler(),)):
        model = make_pipeline(FlowVectorizer(5, by=by, random_state=0), *steps, RidgeCV(np.logspace(-4, 4, 9)))
        assert cross_val_score(model, sets, target, cv=5).mean() > 0.9


@pytest.mark.parametrize("by", WAYS)
def test_vectors_of_training_sets_have_mean_zero(by):
    np.testing.assert_allclose(FlowVectorizer(3, by=by, size="sums").fit_transform(draw()).mean(0), 0, atol=1e-12)


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
def test_a_machine_needs_no_scaler_in_any_unit(unit):
    sets, labels = draw(60), np.arange(60) % 2
    sets = [unit * (members * (1 + label) / 20 + 0.5) for members, label in zip(sets, labels, strict=True)]
    assert cross_val_score(make_pipeline(FlowVectorizer(4, random_state=0), SVC()), sets, labels, cv=3).mean() > 0.8


# Forms of the input


@pytest.mark.parametrize("by", WAYS)
def test_all_forms_of_the_same_sets_give_the_same(by):
    sets = draw(6)
    vectorizer = FlowVectorizer(3, by=by, random_state=0).fit(sets)
    expected = vectorizer.transform(sets)
    stacked = np.concatenate(sets)
    ptr = np.cumsum([0] + [len(members) for members in sets])
    groups = np.repeat([1, 4, 5, 7, 8, 9], np.diff(ptr))
    shuffle = np.random.default_rng(0).permutation(len(stacked))
    np.testing.assert_array_equal(vectorizer.transform(stacked, offsets=ptr), expected)
    np.testing.assert_array_equal(vectorizer.transform(stacked, groups=groups), expected)
    np.testing.assert_allclose(vectorizer.transform(stacked[shuffle], groups=groups[shuffle]), expected, atol=1e-4)
    data = [SimpleNamespace(x=torch.from_numpy(members).requires_grad_()) for members in sets]
    np.testing.assert_array_equal(vectorizer.transform(data), expected)
    graphs = Batch.from_data_list([Data(x=torch.from_numpy(members)) for members in sets])
    np.testing.assert_array_equal(vectorizer.transform(graphs), expected)
    objects = np.empty(6, dtype=object)
    objects[:] = sets
    np.testing.assert_array_equal(vectorizer.transform(objects), expected)
    equal = np.stack([members[:10] for members in sets])
    np.testing.assert_array_equal(vectorizer.transform(equal), vectorizer.transform(list(equal)))
    np.testing.assert_array_equal(vectorizer.transform(torch.from_numpy(equal)), vectorizer.transform(equal))


def test_each_row_belongs_to_its_set_alone(monkeypatch):
    sets = draw(9)
    vectorizer = FlowVectorizer(3, random_state=0).fit(sets)
    whole = vectorizer.transform(sets)
    monkeypatch.setattr("flowpool.sklearn.vectorizer._ENTRIES_AT_ONCE", 3 * 4 * 40)  # about one set at a time
    np.testing.assert_array_equal(vectorizer.transform(sets), whole)
    np.testing.assert_array_equal(vectorizer.transform(sets[::-1]), whole[::-1])


def test_temporary_memory_is_bounded(monkeypatch):
    sets = read_sets(draw(20))
    longest = int(np.diff(sets.ptr).max())
    parts = list(sets.parts(50))
    assert len(parts) > 5
    assert all(len(part.members) <= max(50, longest) for part in parts)
    np.testing.assert_array_equal(np.concatenate([part.members for part in parts]), sets.members)
    assert sum(len(part) for part in parts) == len(sets)


@pytest.mark.parametrize("standardize", [False, True])
def test_fitting_needs_less_memory_than_the_sets(monkeypatch, standardize):
    stacked = np.random.default_rng(0).normal(size=(60_000, 20))
    offsets = np.arange(0, 60_001, 20)
    monkeypatch.setattr("flowpool.sklearn.vectorizer._ENTRIES_AT_ONCE", 2**14)
    monkeypatch.setattr("flowpool.sklearn.vectorizer._MEMBERS_FOR_KMEANS", 500)
    vectorizer = FlowVectorizer(2, by="step", random_state=0, standardize=standardize)
    vectorizer.fit(stacked[:400], offsets=offsets[:21])  # whatever is loaded once
    tracemalloc.start()
    vectorizer.fit(stacked, offsets=offsets)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < stacked.nbytes
    centred = (stacked - stacked.mean(0)) / (stacked.std(0) if standardize else 1)
    within = centred.reshape(-1, 20, 20).var(axis=1).sum(axis=1).mean()
    assert vectorizer.variance_ == pytest.approx(within, rel=1e-12)


def test_propagation_needs_little_more_memory_than_its_sets():
    features = np.random.default_rng(0).normal(size=(40_000, 5)).astype(np.float32)
    edges = np.stack([np.arange(39_999), np.arange(1, 40_000)])
    tracemalloc.start()
    (found,) = Propagate(8).fit_transform([(features, edges)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * found.nbytes


@pytest.mark.parametrize("by", WAYS)
def test_single_precision_stays_single(by):
    sets = draw(6)
    vectorizer = FlowVectorizer(3, by=by, random_state=0).fit(sets)
    single = vectorizer.transform([members.astype(np.float32) for members in sets])
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, vectorizer.transform(sets), atol=1e-3)


BAD = [
    ([], "There are no sets"),
    (np.zeros((0, 4, 2)), "There are no sets"),
    (np.zeros((4, 2)), r"one array of shape \(4, 2\).*groups"),
    ([np.zeros((3, 2)), np.zeros((0, 2))], r"1 sets are empty \(first: set 1\)"),
    ([np.zeros((3, 2)), np.zeros((3, 4))], "Set 1 has 4 features and set 0 has 2"),
    ([np.zeros((3, 2)), np.zeros(3)], r"Set 1 has shape \(3,\)"),
    ([np.zeros((3, 2)), np.full((3, 2), np.nan)], r"3 members of the sets hold NaN.*set 1, member 0"),
    ([np.zeros((3, 2), complex)], "Set 0 holds complex128"),
    ([np.zeros((3, 0))], r"0 feature\(s\)"),
    ((members for members in [np.eye(2)]), "Found a generator where sets are expected. Pass a list"),
    ([Data(edge_index=torch.empty(2, 0, dtype=torch.long))], "Set 0 has no x. Put Propagate before"),
    (Data(x=torch.eye(2)), r"a single Data where a list of graphs is expected; pass \[graph\]"),
]


@pytest.mark.parametrize(("sets", "message"), BAD)
def test_bad_sets_are_named(sets, message):
    with pytest.raises((ValueError, TypeError), match=message):
        FlowVectorizer(2).fit(sets)


BAD += [
    ([np.ones((3, 2)), np.ma.masked_less(np.eye(3)[:, :2], 0.5)], "has 4 masked values"),
    (
        [np.eye(3), np.full((3, 3), 1e160)],
        r"3 members of the sets hold .*values beyond 1e\+150 \(first: set 1, member 0\)",
    ),
]


BAD_WEIGHTS = [
    ([np.ones(3)], "1 entries for 2 sets"),
    ([np.ones(3), np.ones(3)], r"set 1 has shape \(3,\); the set has 4 members"),
    ([np.ones(3), np.array([1, 1, -0.5, 1])], "1 members.*negative.*set 1, member 2"),
    ([np.ones(3), np.zeros(4)], r"All weights of 1 sets are zero \(first: set 1\)"),
    ([np.ones(3), np.full(4, 1e308)], r"The weights of 1 sets sum to more than a number can hold \(first: set 1\)"),
    (3.0, "3.0 entries"),
]


@pytest.mark.parametrize(("weights", "message"), BAD_WEIGHTS)
def test_bad_weights_are_named(weights, message):
    with pytest.raises(ValueError, match=message):
        FlowVectorizer(2).fit([np.eye(3)[:, :2], np.eye(4)[:, :2]], sample_weight=weights)


BAD_PLACES = [
    ({"groups": [0, 1]}, r"groups has shape \(2,\) for 4 rows"),
    ({"groups": [0, math.nan, 1, math.nan]}, r"missing for 2 rows \(first: row 1\)"),
    ({"groups": np.array([0, None, 1, 1], object)}, r"missing for 1 rows \(first: row 1\)"),
    ({"groups": np.array([0, "a", 1, 1], object)}, r"groups cannot be sorted \(.*\); number the sets"),
    ({"offsets": [0, 3]}, "from 0 to 3; they must rise from 0 to the number of rows, 4"),
    ({"offsets": [0, 3, 2, 4]}, "must rise"),
    ({"offsets": [0, 2, 2, 4]}, r"1 sets are empty \(first: set 1\)"),
    ({"offsets": [0.0, 4.0]}, "pass B . 1 integers"),
    ({"groups": [0] * 4, "offsets": [0, 4]}, "Both groups and offsets"),
]


@pytest.mark.parametrize(("places", "message"), BAD_PLACES)
def test_bad_groups_and_offsets_are_named(places, message):
    with pytest.raises(ValueError, match=message):
        FlowVectorizer(2).fit(np.eye(4), **places)


def test_missing_groups_of_pandas_are_named():
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ValueError, match=r"missing for 1 rows \(first: row 2\)"):
        FlowVectorizer(2).fit(np.eye(4), groups=pandas.Series([0, 0, pandas.NA, 1], dtype="Int64"))


def test_no_rows_are_no_sets():
    with pytest.raises(ValueError, match="There are no sets"):
        FlowVectorizer(2).fit(np.zeros((0, 3)), groups=[])


def test_wrong_widths_and_contradictions_are_refused():
    sets = draw()
    with pytest.raises(ValueError, match="X has 2 features, but FlowVectorizer is expecting 3"):
        FlowVectorizer(2).fit(sets).transform([np.zeros((4, 2))])
    with pytest.raises(ValueError, match=r"reference has shape \(4, 3\); expected \(8, 3\)"):
        FlowVectorizer(8, reference=np.eye(4)[:, :3]).fit(sets)
    with pytest.raises(ValueError, match="X has 5 columns; vectors of this estimator have 13"):
        FlowVectorizer(2, by="step").fit(sets).inverse_transform(np.zeros((1, 5)))
    with pytest.raises(ValueError, match="'by' parameter"):
        FlowVectorizer(by="steps").fit(sets)


# scikit-learn's habits


@pytest.mark.parametrize("by", WAYS)
def test_names_pickles_and_clones(by):
    sets = draw(5)
    vectorizer = FlowVectorizer(3, by=by, random_state=0)
    vectors = vectorizer.fit_transform(sets)
    names = vectorizer.get_feature_names_out(["a", "b", "c"])
    assert len(names) == len(set(names)) == vectors.shape[1]
    assert names[0] == "flowvectorizer0"
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(vectorizer)).transform(sets), vectors)  # noqa: S301
    np.testing.assert_array_equal(clone(vectorizer).fit(sets).transform(sets), vectors)


def test_half_precision_is_read_as_single():
    sets = [torch.from_numpy(members).bfloat16() for members in draw(4)]
    vectorizer = FlowVectorizer(2, random_state=0)
    expected = vectorizer.fit_transform([members.float() for members in sets])
    np.testing.assert_array_equal(vectorizer.fit_transform(sets), expected)


def test_data_frames_with_a_column_x_are_whole_sets():
    pandas = pytest.importorskip("pandas")
    sets = draw(5)
    frames = [pandas.DataFrame(members, columns=["x", "y", "z"]) for members in sets]
    expected = FlowVectorizer(2, random_state=0).fit_transform(sets)
    np.testing.assert_array_equal(FlowVectorizer(2, random_state=0).fit_transform(frames), expected)


def test_data_frames_come_out_if_asked_for():
    pandas = pytest.importorskip("pandas")
    table = FlowVectorizer(2).set_output(transform="pandas").fit_transform(draw(5))
    assert isinstance(table, pandas.DataFrame)
    assert table.columns[0] == "flowvectorizer0"
    pipeline = make_pipeline(Propagate(1), FlowVectorizer(2), StandardScaler()).set_output(transform="pandas")
    graphs = [(members, ALONE) for members in draw(5)]
    assert pipeline.fit_transform(graphs).columns[0] == "flowvectorizer0"
    kernel = WassersteinKernel().set_output(transform="pandas").fit_transform(draw(5))
    assert kernel.columns[-1] == "wassersteinkernel4"


def test_pipelines_with_weights_are_cross_validated():
    sets, labels = draw(24), np.arange(24) % 2
    sets = [members + 3 * label for members, label in zip(sets, labels, strict=True)]
    weights = draw_weights(sets)
    with sklearn.config_context(enable_metadata_routing=True):
        vectorizer = FlowVectorizer(2).set_fit_request(sample_weight=True).set_transform_request(sample_weight=True)
        classifier = LogisticRegression().set_fit_request(sample_weight=False).set_score_request(sample_weight=False)
        pipeline = make_pipeline(vectorizer, classifier)
        found = cross_validate(pipeline, sets, labels, params={"sample_weight": weights}, return_estimator=True, cv=3)
    assert found["test_score"].mean() > 0.9
    # Those of the training sets, and no others, arrived.
    for (train, _), pipeline in zip(StratifiedKFold(3).split(sets, labels), found["estimator"], strict=True):
        fitted = FlowVectorizer(2).fit([sets[number] for number in train], sample_weight=[weights[n] for n in train])
        assert pipeline[0].variance_ == pytest.approx(fitted.variance_)


def test_grid_search_over_the_number_of_points():
    sets, labels = draw(18), np.arange(18) % 2
    pipeline = make_pipeline(FlowVectorizer(random_state=0), StandardScaler(), SVC())
    search = GridSearchCV(pipeline, {"flowvectorizer__num_points": [1, 3]}, cv=3, error_score="raise").fit(sets, labels)
    assert len(search.predict(sets)) == 18


def test_grid_search_hands_weights_to_the_sets_they_belong_to():
    sets, labels = draw(18), np.arange(18) % 2
    weights = draw_weights(sets)
    with sklearn.config_context(enable_metadata_routing=True):
        vectorizer = FlowVectorizer(2).set_fit_request(sample_weight=True).set_transform_request(sample_weight=True)
        classifier = SVC().set_fit_request(sample_weight=False).set_score_request(sample_weight=False)
        search = GridSearchCV(make_pipeline(vectorizer, classifier), {"svc__C": [1.0, 9.0]}, cv=3, error_score="raise")
        search.fit(sets, labels, sample_weight=weights)
    expected = FlowVectorizer(2).fit(sets, sample_weight=weights)
    assert search.best_estimator_[0].variance_ == pytest.approx(expected.variance_)
    assert expected.variance_ != pytest.approx(FlowVectorizer(2).fit(sets).variance_)


@pytest.mark.parametrize(
    ("estimator", "change", "message"),
    [
        (FlowVectorizer(2), {"by": "free"}, "by was 'step' in the last fit and is 'free' now; fit again"),
        (FlowVectorizer(2), {"num_points": 3}, "num_points was 2 in the last fit and is 3 now"),
        (FlowVectorizer(2, reference=np.eye(3)[:2]), {"reference": np.ones((2, 3))}, "reference was"),
        (WassersteinKernel(1.0), {"gamma": 2.0}, "gamma was 1.0 in the last fit and is 2.0 now"),
    ],
)
def test_parameters_that_changed_after_a_fit_are_named(estimator, change, message):
    sets = draw(4)
    estimator = clone(estimator).fit(sets)
    before = estimator.transform(sets)
    with pytest.raises(ValueError, match=message):
        estimator.set_params(**change).transform(sets)
    assert estimator.fit(sets).transform(sets).shape[0] == len(before)


def test_threads_and_a_bar_change_nothing(capsys):
    sets = draw(30)
    expected = FlowVectorizer(3, random_state=0).fit_transform(sets)
    vectorizer = FlowVectorizer(3, random_state=0, n_jobs=2, verbose=True).fit(sets)
    np.testing.assert_array_equal(vectorizer.set_params(n_jobs=-1).transform(sets), expected)
    printed = capsys.readouterr()
    assert "Sets" in printed.err and printed.out == ""


def test_only_training_sets_are_looked_at():
    sets = draw()
    vectorizer = FlowVectorizer(3, random_state=0, standardize=True).fit(sets)
    kept = {name: np.copy(getattr(vectorizer, name)) for name in ("reference_", "mean_", "scale_", "variance_")}
    vectorizer.transform([members * 100 for members in sets])
    for name, value in kept.items():
        np.testing.assert_array_equal(getattr(vectorizer, name), value)


# Graphs


PATH = np.array([[0, 1, 1, 2], [1, 0, 2, 1]])  # 0 - 1 - 2
ALONE = np.empty((2, 0), int)


def test_propagation_by_hand():
    sets = Propagate(2).fit_transform([(np.array([[1.0], [0], [0], [1]]), PATH)])
    first = np.array([1.0, 0, 0, 1])
    second = np.array([0.5, 0.25, 0, 1])  # 1: the mean of its neighbours is 1/2; 3 is alone
    third = np.array([(0.5 + 0.25) / 2, (0.25 + 0.25) / 2, 0.125, 1])
    np.testing.assert_allclose(sets[0], np.stack([first, second, third], 1))


def test_attributes_are_standardised_on_training_graphs_and_labels_are_not():
    random = np.random.default_rng(0)
    graphs = [(np.stack([random.normal(5, 3, 4), [1.0, 0, 0, 0]], 1), PATH) for _ in range(5)]
    found = Propagate(0).fit(graphs[:4])
    stacked = np.concatenate(found.transform(graphs[:4]))
    np.testing.assert_allclose([stacked[:, 0].mean(), stacked[:, 0].std()], [0, 1], atol=1e-12)
    assert stacked[:, 1].tolist() == [1, 0, 0, 0] * 4
    values = np.concatenate([graph[0][:, 0] for graph in graphs[:4]])
    np.testing.assert_allclose(
        found.transform(graphs[4:])[0][:, 0], (graphs[4][0][:, 0] - values.mean()) / values.std()
    )


def test_integers_are_labels_and_unknown_ones_are_nothing():
    propagate = Propagate(0).fit([(np.array([3, 7, 3]), PATH)])
    assert propagate.transform([(np.array([7, 5, 3]), PATH)])[0].tolist() == [[0, 1], [0, 0], [1, 0]]


def test_degrees_stand_for_missing_features():
    graphs = [SimpleNamespace(x=None, edge_index=torch.from_numpy(PATH), num_nodes=4)]
    (found,) = Propagate(0).fit_transform(graphs)
    degrees = np.array([1.0, 2, 1, 0])
    for column, values in zip(found.T, (degrees, np.log1p(degrees)), strict=True):
        np.testing.assert_allclose(column, (values - values.mean()) / values.std())


@pytest.mark.parametrize(
    ("x", "names"),
    [
        (np.eye(4)[:, :2] / 3, ["x0", "x1", "x0_round1", "x1_round1"]),
        (np.array([3, 7, 3, 3]), ["x0_3", "x0_7", "x0_3_round1", "x0_7_round1"]),
        (None, ["degree", "log_degree", "degree_round1", "log_degree_round1"]),
    ],
)
def test_features_of_propagation_have_names(x, names):
    edges = np.concatenate([PATH, [[3], [2]]], axis=1)
    propagate = Propagate(1).fit([(x, edges)])
    assert propagate.get_feature_names_out().tolist() == names
    assert propagate.transform([(x, edges)])[0].shape[1] == len(names)


def test_graphs_of_different_sizes_do_not_touch():
    random = np.random.default_rng(0)
    graphs = [(random.normal(size=(n, 2)), PATH) for n in (3, 5, 4)]
    propagate = Propagate(3).fit(graphs)
    together = propagate.transform(graphs)
    for graph, expected in zip(graphs, together, strict=True):
        np.testing.assert_allclose(propagate.transform([graph])[0], expected, atol=1e-12)
    assert [len(found) for found in together] == [3, 5, 4]


@pytest.mark.parametrize(
    ("graphs", "message"),
    [
        ([], "at least one graph"),
        ([3], "Graph 0 is a int"),
        ([(np.eye(2), PATH)], "Graph 0 has an edge to node 2; its nodes are 0 to 1"),
        ([(np.eye(3), PATH - 1)], "an edge to node -1"),
        ([(np.eye(3), PATH.T)], r"edge_index of graph 0 is int64 \(4, 2\)"),
        ([(np.eye(3), PATH), (np.eye(3, dtype=int), PATH)], "all need the same kind"),
        ([(None, ALONE)], "Graph 0 has no nodes"),
        (Data(x=torch.eye(3)), "a single Data where a list of graphs is expected"),
    ],
)
def test_bad_graphs_are_named(graphs, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Propagate().fit(graphs)


def test_a_pipeline_tells_stars_from_paths():
    random = np.random.default_rng(0)
    graphs, labels = [], []
    for number in range(30):
        size, star = int(random.integers(5, 12)), number % 2
        here = np.zeros(size - 1, int) if star else np.arange(size - 1)
        edges = np.stack([here, np.arange(1, size)])
        graphs.append((None, np.concatenate([edges, edges[::-1]], 1)))
        labels.append(star)
    pipeline = make_pipeline(Propagate(2), FlowVectorizer(4, random_state=0), StandardScaler(), SVC())
    assert cross_validate(pipeline, graphs, labels, cv=3)["test_score"].min() == 1.0


# Distances and kernels


def test_distances_agree_with_another_solver():
    sets = draw(6)
    weights = draw_weights(sets)
    found = wasserstein_distances(sets[:3], sets[3:], masses_a=weights[:3], masses_b=weights[3:])
    for row in range(3):
        for column in range(3):
            a, b = weights[row] / weights[row].sum(), weights[3 + column] / weights[3 + column].sum()
            expected = math.sqrt(ot.emd2(a, b, ot.dist(sets[row], sets[3 + column])))
            assert found[row, column] == pytest.approx(expected, rel=1e-9)


def test_assignments_agree_with_transport():
    clouds = np.stack([members[:7] for members in draw(5)])
    found = wasserstein_distances(clouds + 1e6)  # far from the origin
    assert (np.diag(found) == 0).all() and (found == found.T).all()
    assert found[1, 4] == pytest.approx(math.sqrt(ot.emd2([], [], ot.dist(clouds[1], clouds[4]))), rel=1e-7)


def test_clouds_far_from_all_others_keep_their_distance():
    clouds = [members[:4] + 1e6 * place for place, members in enumerate(draw(4))]
    moved = [cloud + 0.01 for cloud in clouds]
    found = np.diag(wasserstein_distances(clouds, moved))
    np.testing.assert_allclose(found, 0.01 * math.sqrt(3), rtol=1e-6)
    assert (np.diag(wasserstein_distances(clouds, clouds)) == 0).all()


@pytest.mark.parametrize("size", [1e-12, 1e-7, 1e12])
def test_distances_commute_with_scaling(size):
    sets = draw(5)
    found = wasserstein_distances([members * size for members in sets])
    np.testing.assert_allclose(found, size * wasserstein_distances(sets), rtol=1e-12)


def test_large_clouds_are_solved_to_the_end():
    random = np.random.default_rng(0)
    cloud = random.normal(size=(2000, 8))
    moved = random.permutation(np.repeat(cloud, 2, axis=0)) + 3 / math.sqrt(8)
    assert wasserstein_distances([cloud], [moved])[0, 0] == pytest.approx(3, rel=1e-9)


def test_one_point_is_at_its_root_mean_square_distance():
    cloud = draw(1)[0]
    found = wasserstein_distances([cloud], [np.zeros((1, 3))])
    assert found[0, 0] == pytest.approx(math.sqrt((cloud**2).sum(1).mean()))


def test_parts_of_distances_are_put_together(monkeypatch):
    sets = draw(7)
    whole = wasserstein_distances(sets)
    monkeypatch.setattr("flowpool.sklearn.distances._ENTRIES_AT_ONCE", 1)
    np.testing.assert_array_equal(wasserstein_distances(sets), whole)


def test_progress_goes_to_stderr(capsys):
    wasserstein_distances(draw(3), verbose=True)
    printed = capsys.readouterr()
    assert "Wasserstein distances" in printed.err and printed.out == ""


def test_the_kernel_is_that_of_the_distances():
    sets = draw(8)
    distances = wasserstein_distances(sets)
    kernel = WassersteinKernel(0.7)
    np.testing.assert_allclose(kernel.fit_transform(sets), np.exp(-0.7 * distances))
    np.testing.assert_allclose(kernel.fit(sets[:5]).transform(sets[5:]), np.exp(-0.7 * distances[5:, :5]))
    median = np.median(distances[np.triu_indices(8, 1)])
    assert WassersteinKernel().fit(sets).gamma_ == pytest.approx(1 / median)
    weights = draw_weights(sets)
    weighted = wasserstein_distances(sets, masses_a=weights)
    found = WassersteinKernel(1.0).fit(sets, sample_weight=weights).transform(sets, sample_weight=weights)
    np.testing.assert_allclose(found, np.exp(-weighted), atol=1e-6)


def test_the_kernel_classifies():
    sets, labels = draw(24), np.arange(24) % 2
    sets = [members + 3 * label for members, label in zip(sets, labels, strict=True)]
    pipeline = make_pipeline(WassersteinKernel(), SVC(kernel="precomputed"))
    assert cross_validate(pipeline, sets, labels, cv=3)["test_score"].mean() > 0.9


def test_bad_clouds_are_named():
    with pytest.raises(ValueError, match="3 and 2 features"):
        wasserstein_distances(draw(2), draw(2, dim=2))
    with pytest.raises(ValueError, match="masses_b belong to clouds_b"):
        wasserstein_distances(draw(2), masses_b=[np.ones(3)])
