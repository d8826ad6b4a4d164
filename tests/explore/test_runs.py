"""Runs: what is found, what is shown of it, and that no other file is."""

import os
from pathlib import Path

import numpy as np
import pytest
from lab.samples import fold_result

from flowpool.explore import runs
from flowpool.lab.results import Store

CONFIGURATION = {
    "dataset": "MUTAG", "metric": "accuracy", "protocol": "paper", "backbone": "sgc", "propagation": "raw", "padding": "none",
    "channels": [8], "layers": [2], "jumping": False, "num_points": 5,
    "size": "none", "norm": "output", "max_epochs": 300, "seed": 0, "flow": {},
}  # fmt: skip
ACCURACIES = {"flow": (0.7, 0.8, 0.9), "sum": (0.6, 0.8, 0.7)}


def write_run(folder: Path, report: str | None = "<p>a report</p>") -> Path:
    store = Store(folder, CONFIGURATION)
    for pool, values in ACCURACIES.items():
        for fold, value in enumerate(values):
            store.save(fold_result(pool, fold, value))
    if report is not None:
        (folder / "report.html").write_text(report)
    return folder


def test_a_run_is_shown_with_every_fold(tmp_path: Path) -> None:
    write_run(tmp_path / "one")
    given = runs.answer(tmp_path, {"run": "one"})
    assert [row["pool"] for row in given["rows"]] == ["flow", "sum"]
    for row in given["rows"]:
        assert row["folds"] == pytest.approx(ACCURACIES[row["pool"]])
        assert row["mean"] == pytest.approx(np.mean(ACCURACIES[row["pool"]]))
    assert given["reference"] == "flow" and "difference" not in given["rows"][0]
    assert given["rows"][1]["difference"] == pytest.approx(-0.1)
    assert given["report"] is True and given["dataset"] == "MUTAG"


def test_runs_are_found_at_any_depth_the_newest_first(tmp_path: Path) -> None:
    assert runs.list_all(tmp_path / "nothing", {})["runs"] == []
    old, new = write_run(tmp_path / "old"), write_run(tmp_path / "deep" / "new", report=None)
    for age, place in enumerate((new, old)):
        os.utime(place / "configuration.json", (1e9 - age, 1e9 - age))
    assert runs.list_all(tmp_path, {}) == {"folder": str(tmp_path), "runs": ["deep/new", "old"]}
    assert runs.answer(tmp_path, {"run": "deep/new"})["report"] is False


def test_only_listed_runs_can_be_read(tmp_path: Path) -> None:
    write_run(tmp_path / "inside")
    write_run(tmp_path / "outside")
    assert runs.report(tmp_path, "inside") == b"<p>a report</p>"
    for name in ("../outside", "/etc", "", "inside/../../outside"):
        with pytest.raises(ValueError, match="There is no run"):
            runs.report(tmp_path / "inside" / "deeper", name)


def test_an_unfinished_and_a_damaged_run_say_so(tmp_path: Path) -> None:
    Store(tmp_path / "begun", CONFIGURATION)
    with pytest.raises(ValueError, match="No fold of .*begun is finished yet"):
        runs.answer(tmp_path, {"run": "begun"})
    write_run(tmp_path / "hurt")
    (tmp_path / "hurt" / "sum" / "repeat-0-fold-1.json").write_text("{")
    with pytest.raises(ValueError, match="repeat-0-fold-1.json is damaged"):
        runs.answer(tmp_path, {"run": "hurt"})


@pytest.mark.parametrize("content", ["not JSON", "[]", '{"protocol": "paper"}'])
def test_a_configuration_that_is_none_is_said_in_one_sentence(tmp_path: Path, content: str) -> None:
    (write_run(tmp_path / "hurt") / "configuration.json").write_text(content)
    with pytest.raises(ValueError, match="hurt.* (cannot be read|is damaged)"):
        runs.answer(tmp_path, {"run": "hurt"})


def test_links_that_lead_nowhere_or_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    secret = write_run(tmp_path / "elsewhere", report="secret") / "report.html"
    folder = tmp_path / "runs"
    linked = write_run(folder / "linked", report=None)
    (linked / "report.html").symlink_to(secret)
    (folder / "gone").mkdir()
    (folder / "gone" / "configuration.json").symlink_to(tmp_path / "nothing")
    (folder / "taken").mkdir()
    (folder / "taken" / "configuration.json").symlink_to(secret.parent / "configuration.json")
    (folder / "itself").symlink_to(folder)
    assert runs.list_all(folder, {})["runs"] == ["linked"]
    assert runs.answer(folder, {"run": "linked"})["report"] is False
    with pytest.raises(ValueError, match="The run 'linked' has no report"):
        runs.report(folder, "linked")
