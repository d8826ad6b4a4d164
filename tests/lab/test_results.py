"""The result folder: what is written comes back, and what is wrong is said."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from flowpool.lab.results import Candidate, Result, ResultError, Run, Store, Task
from flowpool.lab.training import Curve

CONFIGURATION = {"dataset": "MUTAG", "seed": 0, "channels": (8,)}


def result(pool: str = "sum", repeat: int = 0, fold: int = 3, scores: tuple[float, ...] = (0.5, 1.0)) -> Result:
    runs = [
        Run(score, [0, 1], 0.25, 2.0, 8, 82, Curve([0.1, 1 / 3], [math.nan, 0.7], [0.5, 0.75]), 1) for score in scores
    ]
    chosen = Candidate({"channels": 8, "learning_rate": 0.01}, 0.75)
    return Result(pool, repeat, fold, [4, 9], [0, 0], 1 / 9, [chosen], chosen, runs, 1.5, ["careful"])


def test_a_result_comes_back_as_it_was(tmp_path: Path) -> None:
    store = Store(tmp_path / "r", CONFIGURATION)
    saved = result()
    assert store.load(saved.task) is None
    store.save(saved)
    loaded = Store(tmp_path / "r", CONFIGURATION).load(Task("sum", 0, 3))
    assert loaded is not None
    for one, other in zip(saved.runs, loaded.runs, strict=True):
        assert one.curve is not None and other.curve is not None
        assert math.isnan(other.curve.validation_loss[0])
        same = replace(other.curve, validation_loss=one.curve.validation_loss)
        assert same == one.curve
    assert replace(loaded, runs=saved.runs) == saved
    json.loads(store.path(saved.task).read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_score_and_time_are_means_over_the_runs() -> None:
    assert result().score == 0.75
    assert result().seconds_per_epoch == 0.5 / 4


def test_results_found_are_those_asked_for(tmp_path: Path) -> None:
    store = Store(tmp_path, CONFIGURATION)
    for fold in (1, 2):
        store.save(result(fold=fold))
    found = store.load_all([Task("sum", 0, 2), Task("sum", 0, 5), Task("mean", 0, 1)])
    assert [entry.task for entry in found] == [Task("sum", 0, 2)]


def test_another_configuration_is_refused_by_name(tmp_path: Path) -> None:
    Store(tmp_path, CONFIGURATION)
    Store(tmp_path, {"seed": 0, "channels": [8], "dataset": "MUTAG"})  # the same, spelt otherwise
    with pytest.raises(ResultError, match=r"another configuration: seed is 0 there and 1 here\. Name another folder"):
        Store(tmp_path, CONFIGURATION | {"seed": 1})


def test_folders_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ResultError, match=r"no result folder: it has thesis\.tex"):
        Store(tmp_path, CONFIGURATION)
    with pytest.raises(ResultError, match="is a file"):
        Store(tmp_path / "thesis.tex", CONFIGURATION)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.tex"]


def test_leftovers_of_a_killed_process_are_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / ".part-00.json").write_text('{"half": ')
    store = Store(folder, CONFIGURATION)
    (folder / "sum").mkdir()
    (folder / "sum" / ".part-01.json").write_text('{"half": ')
    assert store.load_all([Task("sum", 0, fold) for fold in range(10)]) == []
    store.save(result())
    assert store.load(result().task) is not None


@pytest.mark.parametrize("tenth", range(10))
def test_a_truncated_file_is_named_with_what_to_do(tmp_path: Path, tenth: int) -> None:
    store = Store(tmp_path, CONFIGURATION)
    store.save(result())
    for path in (store.path(result().task), tmp_path / "configuration.json"):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) * tenth // 10])
        with pytest.raises(ResultError, match=rf"{path.name} is damaged .*Delete it and start again"):
            Store(tmp_path, CONFIGURATION).load(result().task)
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "change",
    [{"runs": []}, {"labels": [1]}, {"extra": 1}, {"chosen": 3}, {"runs": [{"score": 1}]}, {"test_graphs": None}],
)
def test_foreign_files_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    store = Store(tmp_path, CONFIGURATION)
    store.save(result())
    path = store.path(result().task)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ResultError, match="is no result of this program"):
        store.load(result().task)


def test_a_result_under_a_wrong_name_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path, CONFIGURATION)
    store.save(result(fold=3))
    store.path(Task("sum", 0, 3)).rename(store.path(Task("sum", 0, 4)))
    with pytest.raises(ResultError, match="is the result of"):
        store.load(Task("sum", 0, 4))
