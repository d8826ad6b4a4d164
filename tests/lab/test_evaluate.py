"""The evaluation: reproducible, resumable, fair."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab.samples import timeless

from flowpool.lab import evaluate as module
from flowpool.lab.comparison import compare
from flowpool.lab.configuration import Configuration
from flowpool.lab.datasets import Source
from flowpool.lab.evaluate import best_of, chosen_pools, evaluate, graded, make_tasks, origin_of_folds, run_fold
from flowpool.lab.leakproof import divide
from flowpool.lab.metrics import METRICS
from flowpool.lab.options import Columns, FlowSettings, Grid, Schedule, Shape
from flowpool.lab.pools import POOLS
from flowpool.lab.results import Candidate, Failure, Result, Store, Task
from flowpool.lab.workers import LocalWorkers

SHORT = Configuration(schedule=Schedule(max_epochs=2))
HERE = LocalWorkers(1)


def store_of(folder: Path, configuration: Configuration = SHORT) -> Store:
    return Store(folder, configuration.identity())


def test_a_fold_repeats_itself_to_the_last_bit() -> None:
    for pool in ("sort", "gmt"):
        task = Task(pool, 1, 4)
        assert timeless(run_fold(SHORT, task)) == timeless(run_fold(SHORT, task))


def test_seeds_repeats_and_folds_make_a_difference() -> None:
    base = run_fold(SHORT, Task("sum", 0, 0))
    others = [
        run_fold(replace(SHORT, seed=1), Task("sum", 0, 0)),
        run_fold(SHORT, Task("sum", 0, 1)),
        run_fold(SHORT, Task("sum", 1, 0)),
    ]
    losses = {result.runs[0].curve.train_loss[0] for result in [base, *others]}
    assert len(losses) == 4


def test_a_result_says_what_was_predicted() -> None:
    result = run_fold(SHORT, Task("sum", 0, 2))
    graphs, fold = SHORT.graphs, SHORT.folds(0)[2]
    assert result.test_graphs == fold.test.tolist()
    assert result.labels == graphs.labels[fold.test].tolist()
    right = [one == other for one, other in zip(result.runs[0].predictions, result.labels, strict=True)]
    assert result.score == sum(right) / len(right)
    assert result.test_ratio == pytest.approx(len(fold.test) / (len(graphs) - len(fold.test)))
    assert result.runs[0].num_parameters == (7 + 1) * 8 + (8 + 1) * 2


def test_folds_are_computed_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = make_tasks(SHORT, ["sum", "mean"], 1)[:6]
    assert tasks[:3] == [Task("sum", 0, 0), Task("mean", 0, 0), Task("sum", 0, 1)]
    first = list(evaluate(SHORT, tasks[:4], store_of(tmp_path), HERE))
    assert [result.task for result in first] == tasks[:4]
    computed: list[Task] = []
    original = module.run_fold

    def note(configuration: Configuration, task: Task) -> Result:
        computed.append(task)
        return original(configuration, task)

    monkeypatch.setattr(module, "run_fold", note)
    assert [result.task for result in evaluate(SHORT, tasks, store_of(tmp_path), HERE)] == tasks[4:]
    assert computed == tasks[4:]
    assert timeless(store_of(tmp_path).load(tasks[0])) == timeless(first[0])


def test_the_grid_chooses_by_the_validation_score_and_three_fresh_runs_count() -> None:
    grid = Grid((4, 8), (0.01, 1e-9), ("loss",))
    result = run_fold(replace(SHORT, protocol="errica", grid=grid), Task("sum", 0, 0))
    tried = [candidate.score for candidate in result.candidates]
    settings = [(c.setting["channels"], c.setting["learning_rate"]) for c in result.candidates]
    assert settings == [(4, 0.01), (4, 1e-9), (8, 0.01), (8, 1e-9)]
    assert all(score is not None for score in tried)
    assert result.chosen == result.candidates[tried.index(max(tried))]  # type: ignore[type-var]
    assert len(result.runs) == 3
    assert len({run.curve.train_loss[0] for run in result.runs}) == 3
    assert result.score == pytest.approx(sum(run.score for run in result.runs) / 3)


def test_a_fold_that_raises_is_kept_with_its_reason_and_the_others_go_on(tmp_path: Path) -> None:
    """As many k-means centres need as many different nodes, which no fold of MUTAG has."""
    configuration = replace(SHORT, flow=FlowSettings(reference="kmeans"), shape=Shape(num_points=9_000))
    tasks = [Task("flow", 0, 0), Task("sum", 0, 0), Task("flow", 0, 1), Task("sum", 0, 1)]
    store = store_of(tmp_path, configuration)
    ended = sorted(evaluate(configuration, tasks, store, HERE), key=lambda end: end.task)
    assert [type(end) for end in ended] == [Failure, Failure, Result, Result]
    failures = store.load_failures(tasks)
    assert [failure.task for failure in failures] == [Task("flow", 0, 0), Task("flow", 0, 1)]
    assert failures[0].reason.startswith("ValueError: 9000 reference points asked for")
    assert "fit_reference" in failures[0].trace
    assert len(store.load_all(tasks)) == 2
    rows = compare(store.load_all(tasks), ["flow", "sum"], "flow", failures=failures)
    assert [(row.pool, row.num_failed) for row in rows] == [("sum", 0)]


def test_a_failed_fold_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, store, original = Task("sum", 0, 0), store_of(tmp_path), module.run_fold

    def broken(*_: object) -> Result:
        raise ArithmeticError("Singular matrix\nand more")

    monkeypatch.setattr(module, "run_fold", broken)
    (failure,) = evaluate(SHORT, [task], store, HERE)
    assert isinstance(failure, Failure)
    assert failure.reason == "ArithmeticError: Singular matrix"
    monkeypatch.setattr(module, "run_fold", original)
    (result,) = evaluate(SHORT, [task], store, HERE)
    assert isinstance(result, Result)
    assert store.load_failures([task]) == []


def test_settings_without_a_pool_that_takes_them_are_refused() -> None:
    with pytest.raises(ValueError, match="None of these pools runs the flow, so that epsilon would have no effect"):
        make_tasks(replace(SHORT, flow=FlowSettings(epsilon=0.5)), ["sum", "flow-step"], 1)


def test_shapes_are_made_and_split() -> None:
    configuration = replace(SHORT, source=Source("SHAPES"), shape=Shape(propagation="raw"))
    result = run_fold(configuration, Task("mean", 0, 0))
    assert len(result.test_graphs) == 50
    assert sorted(set(result.labels)) == list(range(10))


def test_what_a_pool_complains_about_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    build = POOLS["sum"]

    def grumble(in_channels: int, num_points: int, *, seed: int = 0, flow: FlowSettings | None = None) -> Any:
        warnings.warn("3 graphs are bad", RuntimeWarning, stacklevel=1)
        return build(in_channels, num_points, seed=seed, flow=flow)

    monkeypatch.setitem(POOLS, "sum", grumble)
    assert run_fold(SHORT, Task("sum", 0, 0)).warnings == ["3 graphs are bad"]


@pytest.mark.parametrize(
    ("pools", "repeats", "message"),
    [
        (["summ"], 1, "Unknown pool 'summ'; there are .*sum"),
        ([], 1, "No pool"),
        (["sum", "sum"], 1, "named twice"),
        (["sum"], 0, "0 repeats"),
    ],
)
def test_wrong_tasks_are_refused(pools: list[str], repeats: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_tasks(SHORT, pools, repeats)


@pytest.mark.parametrize("num_folds", [0, 11])
def test_folds_that_are_not_there_are_refused(num_folds: int) -> None:
    with pytest.raises(ValueError, match=f"{num_folds} folds; MUTAG has 10"):
        make_tasks(SHORT, ["sum"], 1, num_folds)


def test_the_best_is_the_largest_score_or_the_smallest_error_and_the_first_of_equals() -> None:
    candidates = [Candidate({"n": n}, score) for n, score in enumerate([0.3, 0.7, 0.1, 0.7, float("nan")])]
    assert best_of(candidates, METRICS["accuracy"]) is candidates[1]
    assert best_of(candidates, METRICS["rmse"]) is candidates[2]
    assert best_of(candidates[::-1], METRICS["rmse"]) is candidates[2]  # what is not a number is never the best
    with pytest.raises(ValueError, match="The grid is empty"):
        best_of([], METRICS["rmse"])


def test_predictions_that_are_not_finite_are_a_failure_with_advice() -> None:
    _, exam = divide(SHORT.prepared, SHORT.folds(0)[0])

    class Diverged:
        about: dict[str, Any] = {}

        def predict(self, graphs: object) -> np.ndarray[Any, Any]:
            return np.full(len(exam), np.nan)

    with pytest.raises(ArithmeticError, match="Some predictions are not finite.*smaller learning rate"):
        graded(Diverged(), exam, METRICS["rmse"])


def test_numbers_are_evaluated_like_classes_by_both_protocols(tmp_path: Path) -> None:
    """Sets whose target is their size: a sum is told it, and a kernel machine, too; errors are in the caller's units."""
    source = sets_by_size(tmp_path)
    trained = Configuration.made(source, "paper", "strong", None, 0, {"backbone": "sets", "max_epochs": 20})
    frozen = Configuration.made(source, "frozen", "plain", None, 0, {})
    spread = float(trained.graphs.labels.std())
    assert spread > 1000
    for configuration in (trained, frozen):
        result = run_fold(configuration, Task("sum", 0, 0))
        assert configuration.measure.name == "rmse"
        truth, found = np.array(result.labels), np.array(result.runs[0].predictions)
        assert truth.shape == found.shape == (len(result.test_graphs), 1)
        assert result.score == pytest.approx(float(np.sqrt(((truth - found) ** 2).mean())))
        assert result.score < 0.8 * spread
        rows = compare([result], ["sum"], "sum", metric=configuration.measure)
        assert rows[0].score.mean == result.score


def sets_by_size(folder: Path) -> Source:
    import pyarrow as pa
    from pyarrow import parquet

    random = np.random.default_rng(0)
    sets = [random.normal(size=(size, 2)).tolist() for size in random.integers(2, 40, size=100)]
    targets = [1000.0 * len(members) + 7 for members in sets]
    parquet.write_table(pa.table({"cloud": sets, "y": targets}), folder / "sets.parquet")
    return Source(str(folder / "sets.parquet"), None, Columns(nodes="cloud", target="y"))


def test_pools_are_listed_or_all() -> None:
    assert chosen_pools("sum, mean", POOLS) == ("sum", "mean")
    assert chosen_pools("all", POOLS) == tuple(POOLS)


@pytest.mark.parametrize(
    ("tasks", "more", "expected"),
    [
        ([(0, fold) for fold in range(10)], {}, "10 folds, drawn"),
        ([(0, 0), (0, 1)], {}, "the first 2 of 10 folds, drawn"),
        ([(0, 0), (1, 0), (2, 0)], {}, "the first 1 of 10 folds, drawn; repeats 1 to 2 drawn with these seeds"),
        (
            [(0, 0), (1, 0)],
            {"fixed_folds": True},
            "the first 1 of 10 folds, drawn; 2 trainings with other seeds on each",
        ),
    ],
)
def test_the_origin_of_folds_is_told(tasks: list[tuple[int, int]], more: dict[str, Any], expected: str) -> None:
    identity = {"num_folds": 10, "origin": "drawn"} | more
    assert origin_of_folds(identity, [Task("sum", *where) for where in tasks]) == expected
