"""The evaluation: reproducible, resumable, fair."""

import multiprocessing
import os
import signal
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowpool.lab import evaluate as module
from flowpool.lab import identity
from flowpool.lab.comparison import compare
from flowpool.lab.evaluate import Configuration, Grid, evaluate, folds_of, load_graphs, make_tasks, run_fold
from flowpool.lab.model import Shape
from flowpool.lab.pools import POOLS, FlowSettings
from flowpool.lab.results import Failure, Result, Store, Task
from flowpool.lab.training import Schedule

SHORT = Configuration(schedule=Schedule(max_epochs=2))


def timeless(result: Result | None) -> dict[str, Any]:
    """Everything but the clock."""
    assert result is not None
    entry = asdict(result)
    for run in entry["runs"]:
        del run["seconds"]
    return entry


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
    graphs, fold = load_graphs("MUTAG", None), folds_of("MUTAG", None, 0)[2]
    assert result.test_graphs == fold.test.tolist()
    assert result.labels == graphs.labels[fold.test].tolist()
    right = [one == other for one, other in zip(result.runs[0].predictions, result.labels, strict=True)]
    assert result.accuracy == sum(right) / len(right)
    assert result.test_ratio == pytest.approx(len(fold.test) / (len(graphs) - len(fold.test)))
    assert result.runs[0].num_parameters == (7 + 1) * 8 + (8 + 1) * 2


def test_folds_are_computed_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = make_tasks(SHORT, ["sum", "mean"], 1)[:6]
    assert tasks[:3] == [Task("sum", 0, 0), Task("mean", 0, 0), Task("sum", 0, 1)]
    first = list(evaluate(SHORT, tasks[:4], store_of(tmp_path)))
    assert [result.task for result in first] == tasks[:4]
    computed: list[Task] = []
    original = module.run_fold

    def note(configuration: Configuration, task: Task) -> Result:
        computed.append(task)
        return original(configuration, task)

    monkeypatch.setattr(module, "run_fold", note)
    assert [result.task for result in evaluate(SHORT, tasks, store_of(tmp_path))] == tasks[4:]
    assert computed == tasks[4:]
    assert timeless(store_of(tmp_path).load(tasks[0])) == timeless(first[0])


def test_processes_reach_the_same_results(tmp_path: Path) -> None:
    tasks = make_tasks(SHORT, ["sum", "sort"], 1)[:6]
    list(evaluate(SHORT, tasks, store_of(tmp_path / "one")))
    results = list(evaluate(SHORT, tasks, store_of(tmp_path / "two"), jobs=2))
    assert sorted(result.task for result in results) == sorted(tasks)
    for task in tasks:
        assert timeless(store_of(tmp_path / "one").load(task)) == timeless(store_of(tmp_path / "two").load(task))


def _evaluate_in_child(folder: str, tasks: list[Task]) -> None:
    torch.set_num_threads(1)
    for _ in evaluate(SHORT, tasks, store_of(Path(folder))):
        pass


def test_killed_at_random_moments_it_goes_on_and_reaches_the_same_results(tmp_path: Path) -> None:
    tasks = make_tasks(SHORT, ["sum", "mean"], 1)
    expected = [timeless(result) for result in evaluate(SHORT, tasks, store_of(tmp_path / "whole"))]
    folder = tmp_path / "killed"
    # Children of a server that has imported everything start at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flowpool.lab.evaluate"])
    moments = np.random.default_rng(0)
    kills, done = 0, 0
    while done < len(tasks):
        child = context.Process(target=_evaluate_in_child, args=(str(folder), tasks))
        child.start()
        enough = min(len(tasks), done + int(moments.integers(1, 7)))
        while child.is_alive() and len(list(folder.glob("*/repeat-*.json"))) < enough:
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.02))
        if child.is_alive() and child.pid is not None:
            os.kill(child.pid, signal.SIGKILL)
        child.join()
        kills += child.exitcode == -signal.SIGKILL
        kept = len(store_of(folder).load_all(tasks))
        assert kept >= enough
        done = kept
    assert kills >= 3
    assert [timeless(store_of(folder).load(task)) for task in tasks] == expected


def test_the_grid_chooses_by_validation_accuracy_and_three_fresh_runs_count() -> None:
    grid = Grid((4, 8), (0.01, 1e-9), ("loss",))
    result = run_fold(replace(SHORT, protocol="errica", grid=grid), Task("sum", 0, 0))
    tried = [candidate.validation_accuracy for candidate in result.candidates]
    assert [(c.channels, c.learning_rate) for c in result.candidates] == [(4, 0.01), (4, 1e-9), (8, 0.01), (8, 1e-9)]
    assert all(accuracy is not None for accuracy in tried)
    assert result.chosen == result.candidates[tried.index(max(tried))]  # type: ignore[type-var]
    assert len(result.runs) == 3
    assert len({run.curve.train_loss[0] for run in result.runs}) == 3
    assert result.accuracy == pytest.approx(sum(run.accuracy for run in result.runs) / 3)


def test_what_decides_the_numbers_is_in_the_identity() -> None:
    base = SHORT.identity()
    changes = [
        {"seed": 1},
        {"propagation": "raw"},
        {"grid": Grid((16,), (0.01,), ("loss",))},
        {"shape": Shape(size="append")},
        {"shape": Shape(num_points=6)},
        {"schedule": Schedule(patience=7)},
        {"dataset": "SHAPES"},
        {"shape": Shape(padding="empty")},
        {"flow": FlowSettings(epsilon=0.2)},
        {"flow": FlowSettings(reference_seed=0)},
    ]
    for change in changes:
        assert replace(SHORT, **change).identity() != base  # type: ignore[arg-type]
    assert replace(SHORT, data=str(Path(__file__).parent)).identity() == base  # the place is not the content


def test_another_code_has_another_identity(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "cli").mkdir()
    (tmp_path / "core" / "flow.py").write_text("step = 1\n")
    (tmp_path / "cli" / "app.py").write_text("colour = 1\n")
    fingerprint = identity.of_sources.__wrapped__  # without its memory
    before = fingerprint(tmp_path)
    assert before == fingerprint(tmp_path)
    (tmp_path / "cli" / "app.py").write_text("colour = 2\n")
    assert fingerprint(tmp_path) == before  # what shows results decides none
    (tmp_path / "core" / "flow.py").write_text("step = 2\n")
    assert fingerprint(tmp_path) != before
    assert SHORT.identity()["code"] == identity.of_sources()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"seed": 3}, True),
        ({"shape": Shape(padding="mass")}, True),  # the paper does not say
        ({"flow": FlowSettings(epsilon=1.0, relative=False)}, True),  # nor this
        ({"propagation": "raw"}, False),
        ({"shape": Shape(num_points=4)}, False),
        ({"shape": Shape(norm="nodes")}, False),
        ({"shape": Shape(size="append")}, False),
        ({"grid": Grid((16,), (0.01,), ("loss",))}, False),
        ({"schedule": Schedule(max_epochs=100)}, False),
        ({"dataset": "PTC_MR"}, False),
    ],
)
def test_the_papers_numbers_stand_beside_the_papers_settings_alone(change: dict[str, Any], expected: bool) -> None:
    assert replace(Configuration(), **change).is_as_in_paper is expected


def test_a_fold_that_raises_is_kept_with_its_reason_and_the_others_go_on(tmp_path: Path) -> None:
    """As many k-means centres need as many different nodes, which no fold of MUTAG has."""
    configuration = replace(SHORT, flow=FlowSettings(reference="kmeans"), shape=Shape(num_points=9_000))
    tasks = [Task("flow", 0, 0), Task("sum", 0, 0), Task("flow", 0, 1), Task("sum", 0, 1)]
    store = store_of(tmp_path, configuration)
    ended = sorted(evaluate(configuration, tasks, store), key=lambda end: end.task)
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
    (failure,) = evaluate(SHORT, [task], store)
    assert isinstance(failure, Failure)
    assert failure.reason == "ArithmeticError: Singular matrix"
    monkeypatch.setattr(module, "run_fold", original)
    (result,) = evaluate(SHORT, [task], store)
    assert isinstance(result, Result)
    assert store.load_failures([task]) == []


def test_settings_without_a_pool_that_takes_them_are_refused() -> None:
    with pytest.raises(ValueError, match="None of these pools runs the flow, so that epsilon would have no effect"):
        make_tasks(replace(SHORT, flow=FlowSettings(epsilon=0.5)), ["sum", "flow-step"], 1)


def test_shapes_are_made_and_split() -> None:
    configuration = replace(SHORT, dataset="SHAPES", propagation="raw")
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
    ("change", "message"),
    [
        ({"grid": Grid((8, 16), (0.01,), ("loss",))}, "2 settings; the paper's protocol trains exactly one"),
        ({"grid": Grid((0,), (0.01,), ("loss",))}, "0 channels"),
        ({"grid": Grid((8,), (-1.0,), ("loss",))}, "learning rate is -1.0"),
        ({"protocol": "mine"}, "Unknown protocol 'mine'; pass paper, errica"),
        ({"shape": Shape(backbone="gin")}, "belongs to the backbone sgc"),
    ],
)
def test_wrong_configurations_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SHORT, **change)


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


def test_no_jobs_no_work(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 jobs"):
        list(evaluate(SHORT, [Task("sum", 0, 0)], store_of(tmp_path), jobs=0))
