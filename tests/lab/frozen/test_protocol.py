"""The frozen protocol: nothing of the test graphs reaches what is chosen, and killed runs go on."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from flowpool.lab.frozen.protocol import run_fold
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.svm import SVC, _libsvm
from typer.testing import CliRunner

from flowpool.cli.app import app
from flowpool.lab import evaluate as lab
from flowpool.lab.datasets import load_dataset
from flowpool.lab.frozen import Frozen, FrozenStore, Grid, compare, evaluate, make_tasks
from flowpool.lab.frozen.methods import squared_distances
from flowpool.lab.frozen.published import PUBLISHED, SOURCES, published
from flowpool.lab.frozen.selection import Setting, _parts, _validation_accuracy, learn
from flowpool.lab.leakproof import subset
from flowpool.lab.results import ResultError, Task

SMALL = Grid((0, 2), (0.0,), ("rbf",), (0.5,), (1.0, 10.0))


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLOWPOOL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def test_test_graphs_change_nothing_that_is_learned(monkeypatch):
    configuration, task = Frozen("MUTAG", grid=SMALL), Task("flow-step", 0, 3)
    expected = run_fold(configuration, task)
    dataset = lab.load_graphs("MUTAG", None)
    fold = lab.folds_of("MUTAG", None, 0)[3]
    labels = dataset.labels.clone()
    labels[fold.test] = 1 - labels[fold.test]
    monkeypatch.setattr(lab, "load_graphs", lambda name, data: replace(dataset, labels=labels))
    wrong = run_fold(configuration, task)
    assert wrong.predictions == expected.predictions and wrong.chosen == expected.chosen
    assert wrong.accuracy == pytest.approx(1 - expected.accuracy)
    features = dataset.features.clone()
    for graph in fold.test:
        features[dataset.node_ptr[graph] : dataset.node_ptr[graph + 1]] = torch.tensor([0, 0, 0, 0, 0, 0, 1.0])
    monkeypatch.setattr(lab, "load_graphs", lambda name, data: replace(dataset, features=features))
    other = run_fold(configuration, task)
    assert other.chosen == expected.chosen
    assert len(set(other.predictions)) <= len(set(expected.predictions))


def test_the_best_setting_of_the_inner_folds_is_chosen():
    graphs = subset(load_dataset("MUTAG"), np.arange(0, 188, 2))
    single = [
        learn(graphs, "mean", 1, 0, replace(SMALL, rounds=(rounds,), penalties=(penalty,))).setting
        for rounds in SMALL.rounds
        for penalty in SMALL.penalties
    ]
    best = learn(graphs, "mean", 1, 0, SMALL).setting
    assert best in single
    assert best.validation_accuracy == max(setting.validation_accuracy for setting in single)


def test_settings_are_compared_by_the_machine_that_is_fitted_in_the_end(capfd):
    random = np.random.default_rng(0)
    vectors, labels = random.normal(size=(90, 3)), np.arange(90) % 3
    kernel = np.exp(-squared_distances(vectors + labels[:, None], vectors + labels[:, None]))
    inner = list(StratifiedKFold(3).split(labels, labels))
    for penalty in (0.1, 1.0, 100.0):
        expected = cross_val_score(SVC(C=penalty, kernel="precomputed"), kernel, labels, cv=inner).mean()
        assert 0.4 < expected < 0.9
        _libsvm.set_verbosity_wrap(1)  # as it is before an estimator silences it
        assert _validation_accuracy(_parts(kernel, labels, inner), penalty) == pytest.approx(expected)
    assert capfd.readouterr() == ("", "")  # the solver is silent


def test_without_edges_rounds_are_not_tried():
    digits = subset(lab.load_graphs("DIGITS", None), np.arange(60))
    assert Grid().rounds_for(digits) == (0,)
    assert Grid().rounds_for(load_dataset("MUTAG")) == (0, 2, 4)


def test_the_size_is_offered_to_every_method():
    # All nodes are equal; only the sizes tell the classes apart.
    graphs = subset(load_dataset("MUTAG"), np.arange(80))
    sizes = graphs.node_ptr.diff()
    told = replace(
        graphs,
        features=torch.ones(len(graphs.features), 1),
        edge_index=graphs.edge_index[:, :0],
        edge_ptr=torch.zeros_like(graphs.edge_ptr),
        labels=(sizes > sizes.median()).long(),
    )
    learned = learn(told, "mean", 1, 0, replace(SMALL, sizes=(0.0, 0.1), gammas=(2.0,), penalties=(100.0,)))
    assert learned.setting.size == 0.1
    assert np.mean(np.array(learned.predict(told)) == told.labels.numpy()) > 0.95


def test_a_killed_run_goes_on(tmp_path):
    configuration = Frozen("MUTAG", grid=SMALL)
    tasks = make_tasks(configuration, ["mean", "sum"], 1)
    assert len(tasks) == 20
    store = FrozenStore(tmp_path / "r", configuration.identity())
    first = list(evaluate(configuration, tasks[:3], store))
    again = FrozenStore(tmp_path / "r", configuration.identity())
    assert again.load_all(tasks) == sorted(first, key=lambda result: tasks.index(result.task))
    assert [result.task for result in evaluate(configuration, tasks[:4], again)] == [tasks[3]]
    (tmp_path / "r" / "sum" / "repeat-0-fold-0.json").write_text('{"pool": "sum"}')
    with pytest.raises(ResultError, match="is no result of this program"):
        again.load_all(tasks)
    with pytest.raises(ResultError, match="num_points is 8 there and 4 here"):
        FrozenStore(tmp_path / "r", Frozen("MUTAG", num_points=4, grid=SMALL).identity())


def test_rows_are_compared_fold_by_fold():
    configuration = Frozen("MUTAG", grid=SMALL)
    results = [run_fold(configuration, Task(name, 0, fold)) for fold in range(2) for name in ("mean", "wegl")]
    mean, wegl = compare(results, ["mean", "wegl"], "mean", "MUTAG")
    assert mean.difference is None and mean.published is None
    assert wegl.difference is not None
    assert wegl.difference.mean == pytest.approx(wegl.accuracy.mean - mean.accuracy.mean)
    assert wegl.published == 88.3
    assert wegl.width >= mean.width > 0


def test_published_numbers_have_sources():
    assert PUBLISHED.keys() == SOURCES.keys()
    assert published("flow-step", "MUTAG") is None


def test_settings_of_a_kernel_of_its_own_vary_the_penalty_alone():
    assert list(SMALL.settings(2, "kernel")) == [Setting(2, "kernel", 0.0, "own", None, c) for c in (1.0, 10.0)]


def run(*arguments: str):
    return CliRunner().invoke(app, ["evaluate", *arguments], env={"COLUMNS": "140"})


def test_the_command_prints_a_table_and_writes_a_report(monkeypatch):
    monkeypatch.setattr("flowpool.lab.frozen.Frozen", partial(Frozen, grid=SMALL))
    arguments = ["MUTAG", "--protocol", "frozen", "--pools", "mean,wegl", "--jobs", "1", "--out", "r"]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    accuracies = []
    for path in Path("r/wegl").glob("*.json"):
        entry = json.loads(path.read_text())
        accuracies.append(np.mean(np.array(entry["predictions"]) == np.array(entry["labels"])))
    assert len(accuracies) == 10
    expected = f"{100 * np.mean(accuracies):.2f} ± {100 * np.std(accuracies):.2f}"
    assert expected in result.output and expected in Path("r/report.html").read_text()
    assert "88.3" in result.output and "Kolouri" in result.output
    printed = run(*arguments, "--json")
    data = json.loads(printed.stdout)
    assert [row["pool"] for row in data["pools"]] == ["mean", "wegl"]


def test_the_command_refuses_what_it_would_ignore():
    result = run("MUTAG", "--protocol", "frozen", "--max-epochs", "3")
    assert result.exit_code == 2 and "--max-epochs is about training" in result.output
    result = run("MUTAG", "--protocol", "frozen", "--pools", "mena")
    assert result.exit_code == 2 and "Unknown pool 'mena'" in result.output
    result = run("DIGITS", "--pools", "mean", "--jobs", "1")
    assert result.exit_code == 2 and "masses, which this does not take into account" in result.output


def test_a_method_that_does_not_fit_the_data_says_so(monkeypatch):
    monkeypatch.setattr("flowpool.lab.frozen.Frozen", partial(Frozen, grid=SMALL))
    result = run("DIGITS", "--protocol", "frozen", "--pools", "wl", "--jobs", "1", "--points", "3", "--out", "r")
    assert result.exit_code == 1 and "Every fold failed" in result.output and "have attributes" in result.output
    assert json.loads(Path("r/configuration.json").read_text())["num_points"] == 3
