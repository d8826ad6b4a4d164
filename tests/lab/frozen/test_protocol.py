"""The frozen protocol: nothing of the test graphs reaches what is chosen, and killed runs go on."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lab.samples import timeless
from sklearn.linear_model import Ridge as Oracle
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.svm import SVC, _libsvm
from typer.testing import CliRunner

from flowpool.cli.app import app
from flowpool.lab.comparison import compare
from flowpool.lab.configuration import Configuration
from flowpool.lab.datasets import GraphDataset, Source, load_dataset, load_graphs
from flowpool.lab.evaluate import best_of, evaluate, make_tasks, run_fold
from flowpool.lab.frozen.methods import squared_distances
from flowpool.lab.frozen.published import PUBLISHED, SOURCES, published
from flowpool.lab.frozen.selection import KernelGrid, KernelLearner, Ridge, Setting, _parts, inner_score
from flowpool.lab.leakproof import Practice, subset
from flowpool.lab.metrics import METRICS
from flowpool.lab.results import Candidate, Result, ResultError, Store, Task
from flowpool.lab.workers import LocalWorkers

SMALL = KernelGrid((0, 2), (0.0,), ("rbf",), (0.5,), (1.0, 10.0))


FROZEN = Configuration.made(Source(), "frozen", "plain", None, 0, {})
FROZEN = replace(FROZEN, kernels=SMALL)
HERE = LocalWorkers(1)


def learned(graphs: GraphDataset, method: str, grid: KernelGrid) -> tuple[Candidate, KernelLearner, Practice]:
    """The best candidate, and who found it."""
    learner = KernelLearner(replace(FROZEN, kernels=grid), method)
    practice = Practice(graphs, len(graphs))
    return best_of(learner.candidates(practice, 0), METRICS["accuracy"]), learner, practice


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLOWPOOL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def test_test_graphs_change_nothing_that_is_learned(monkeypatch):
    task = Task("flow-step", 0, 3)
    expected = run_fold(FROZEN, task)
    dataset, fold = FROZEN.graphs, FROZEN.folds(0)[3]
    labels, features = dataset.labels.clone(), dataset.features.clone()
    labels[fold.test] = 1 - labels[fold.test]
    for graph in fold.test:
        features[dataset.node_ptr[graph] : dataset.node_ptr[graph + 1]] = torch.tensor([0, 0, 0, 0, 0, 0, 1.0])
    monkeypatch.setattr(Source, "load", lambda *_: replace(dataset, labels=labels))
    wrong = run_fold(FROZEN, task)
    assert wrong.runs[0].predictions == expected.runs[0].predictions
    assert wrong.candidates == expected.candidates and wrong.chosen == expected.chosen
    assert wrong.score == pytest.approx(1 - expected.score)
    monkeypatch.setattr(Source, "load", lambda *_: replace(dataset, features=features))
    other = run_fold(FROZEN, task)
    assert other.candidates == expected.candidates
    assert len(set(other.runs[0].predictions)) <= len(set(expected.runs[0].predictions))


def test_the_best_setting_of_the_inner_folds_is_chosen():
    graphs = subset(load_dataset("MUTAG"), np.arange(0, 188, 2))
    single = [
        learned(graphs, "mean", replace(SMALL, rounds=(rounds,), penalties=(penalty,)))[0]
        for rounds in SMALL.rounds
        for penalty in SMALL.penalties
    ]
    best, learner, practice = learned(graphs, "mean", SMALL)
    assert best in single
    assert best.score == max(candidate.score for candidate in single)
    with pytest.raises(ValueError, match="Only the best setting was kept"):
        learner.learn(practice, best.setting | {"penalty": 7.0}, 0)


def test_settings_are_compared_by_the_machine_that_is_fitted_in_the_end(capfd):
    random = np.random.default_rng(0)
    vectors, labels = random.normal(size=(90, 3)), np.arange(90) % 3
    kernel = np.exp(-squared_distances(vectors + labels[:, None], vectors + labels[:, None]))
    inner = list(StratifiedKFold(3).split(labels, labels))
    for penalty in (0.1, 1.0, 100.0):
        expected = cross_val_score(SVC(C=penalty, kernel="precomputed"), kernel, labels, cv=inner).mean()
        assert 0.4 < expected < 0.9
        _libsvm.set_verbosity_wrap(1)  # as it is before an estimator silences it
        assert inner_score(_parts(kernel, labels, inner), penalty, METRICS["accuracy"]) == pytest.approx(expected)
    assert capfd.readouterr() == ("", "")  # the solver is silent


def test_without_edges_rounds_are_not_tried():
    digits = subset(load_graphs("DIGITS"), np.arange(60))
    assert KernelGrid().rounds_for(digits) == (0,)
    assert KernelGrid().rounds_for(load_dataset("MUTAG")) == (0, 2, 4)


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
    grid = replace(SMALL, sizes=(0.0, 0.1), gammas=(2.0,), penalties=(100.0,))
    best, learner, practice = learned(told, "mean", grid)
    assert best.setting["size"] == 0.1
    assert np.mean(learner.learn(practice, best.setting, 0).predict(told) == told.labels.numpy()) > 0.95


def test_ridge_is_that_of_scikit_learn_with_a_free_intercept():
    random = np.random.default_rng(0)
    vectors, targets = random.normal(size=(30, 4)), random.normal(size=(30, 2)) + 5
    middle = vectors.mean(0)
    kernel = (vectors - middle) @ (vectors - middle).T
    ours = Ridge(10.0).fit(kernel, targets)
    new = random.normal(size=(6, 4))
    expected = Oracle(alpha=1 / 20).fit(vectors, targets).predict(new)
    np.testing.assert_allclose(ours.predict((new - middle) @ (vectors - middle).T), expected, atol=1e-8)


def test_numbers_and_rankings_are_chosen_by_their_own_metric():
    graphs = subset(load_dataset("MUTAG"), np.arange(0, 188, 2))
    told = replace(graphs, labels=graphs.node_ptr.diff().double()[:, None], class_names=())
    for name, dataset in (("auc", graphs), ("rmse", told), ("r2", told)):
        learner = KernelLearner(replace(FROZEN, metric=name), "sum")
        object.__setattr__(learner.configuration, "measure", METRICS[name])
        practice = Practice(dataset, len(dataset))
        best = best_of(learner.candidates(practice, 0), METRICS[name])
        predictions = learner.learn(practice, best.setting, 0).predict(dataset)
        assert predictions.shape == ((94, 2) if name == "auc" else (94, 1))
        score = METRICS[name].score(predictions, dataset.labels.numpy())
        assert score < 1 if name == "rmse" else score > 0.8, (name, score)


def test_a_killed_run_goes_on(tmp_path):
    tasks = make_tasks(FROZEN, ["mean", "sum"], 1)
    assert len(tasks) == 20
    store = Store(tmp_path / "r", FROZEN.identity())
    first = list(evaluate(FROZEN, tasks[:3], store, HERE))
    again = Store(tmp_path / "r", FROZEN.identity())
    assert [timeless(result) for result in again.load_all(tasks)] == [timeless(result) for result in first]
    assert [result.task for result in evaluate(FROZEN, tasks[:4], again, HERE)] == [tasks[3]]
    (tmp_path / "r" / "sum" / "repeat-0-fold-0.json").write_text('{"pool": "sum"}')
    with pytest.raises(ResultError, match="is no result of this program"):
        again.load_all(tasks)
    fewer = replace(FROZEN, shape=replace(FROZEN.shape, num_points=4))
    with pytest.raises(ResultError, match="num_points is 8 there and 4 here"):
        Store(tmp_path / "r", fewer.identity())


def test_rows_are_compared_fold_by_fold():
    results = [run_fold(FROZEN, Task(name, 0, fold)) for fold in range(2) for name in ("mean", "wegl")]
    assert all(isinstance(result, Result) for result in results)
    rows = {row.pool: row for row in compare(results, ["mean", "wegl"], "mean")}
    mean, wegl = rows["mean"], rows["wegl"]
    assert mean.difference is None and wegl.difference is not None
    assert wegl.difference.mean == pytest.approx(wegl.score.mean - mean.score.mean)
    assert wegl.width >= mean.width > 0
    assert mean.seconds_per_epoch is None and mean.seconds_per_thousand > 0


def test_published_numbers_have_sources():
    assert PUBLISHED.keys() == SOURCES.keys()
    assert published("flow-step", "MUTAG") is None


def test_settings_of_a_kernel_of_its_own_vary_the_penalty_alone():
    assert list(SMALL.settings(2, "kernel")) == [Setting(2, "kernel", 0.0, "own", None, c) for c in (1.0, 10.0)]


def small_grids(monkeypatch):
    """The command with a small grid."""
    made = Configuration.made
    monkeypatch.setattr(Configuration, "made", staticmethod(lambda *given: replace(made(*given), kernels=SMALL)))


def run(*arguments: str):
    return CliRunner().invoke(app, ["evaluate", *arguments], env={"COLUMNS": "140"})


def test_the_command_prints_a_table_and_writes_a_report(monkeypatch):
    small_grids(monkeypatch)
    arguments = ["MUTAG", "--protocol", "frozen", "--pools", "mean,wegl", "--jobs", "1", "--out", "r"]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    accuracies = []
    for path in Path("r/wegl").glob("*.json"):
        entry = json.loads(path.read_text())
        accuracies.append(np.mean(np.array(entry["runs"][0]["predictions"]) == np.array(entry["labels"])))
    assert len(accuracies) == 10
    expected = f"{100 * np.mean(accuracies):.2f} ± {100 * np.std(accuracies):.2f}"
    assert expected in result.output and expected in Path("r/report.html").read_text()
    assert "88.3" in result.output and "Kolouri" in result.output
    printed = run(*arguments, "--json")
    data = json.loads(printed.stdout)
    assert {row["pool"] for row in data["pools"]} == {"mean", "wegl"}


def test_the_command_refuses_what_it_would_ignore():
    result = run("MUTAG", "--protocol", "frozen", "--max-epochs", "3")
    assert result.exit_code == 2 and "--max-epochs is about training" in result.output
    result = run("MUTAG", "--protocol", "frozen", "--pools", "mena")
    assert result.exit_code == 2 and "Unknown pool 'mena'" in result.output
    result = run("DIGITS", "--pools", "mean", "--jobs", "1")
    assert result.exit_code == 2 and "masses, which this does not take into account" in result.output


def test_a_method_that_does_not_fit_the_data_says_so(monkeypatch):
    small_grids(monkeypatch)
    result = run("DIGITS", "--protocol", "frozen", "--pools", "wl", "--jobs", "1", "--points", "3", "--out", "r")
    assert result.exit_code == 1 and "Every fold failed" in result.output and "have attributes" in result.output
    assert json.loads(Path("r/configuration.json").read_text())["num_points"] == 3
