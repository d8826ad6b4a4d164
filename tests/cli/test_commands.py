"""The command: what it prints, what it refuses, and how it ends."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from lab.samples import fold_result
from typer.testing import CliRunner, Result

from flowpool.cli.app import app
from flowpool.cli.terminal import make_table, show
from flowpool.lab import evaluate as lab_evaluate
from flowpool.lab import speed
from flowpool.lab.datasets import draw_folds, load_graphs
from flowpool.lab.datasets.splits import write_splits
from flowpool.lab.results import Task
from flowpool.lab.speed import Measurement, TrainedRow

SHORT = ["evaluate", "MUTAG", "--max-epochs", "1", "--jobs", "1"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLOWPOOL_DATA", raising=False)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "140"})


def write_tiny(folder: Path) -> Path:
    """Two graphs in TU format: a pair of nodes, and a path of three."""
    folder = folder / "TINY"
    folder.mkdir()
    for name, text in {
        "A": "1, 2\n2, 1\n3, 4\n4, 3\n4, 5\n5, 4\n",
        "graph_indicator": "1\n1\n2\n2\n2\n",
        "graph_labels": "1\n-1\n",
        "node_labels": "0\n1\n0\n1\n2\n",
    }.items():
        (folder / f"TINY_{name}.txt").write_text(text)
    return folder


def test_evaluate_prints_a_table_and_writes_a_report(tmp_path: Path) -> None:
    result = run(*SHORT, "--pools", "sum,sort", "--out", "r")
    assert result.exit_code == 0, result.output
    accuracies = [
        json.loads(path.read_text())["runs"][0]["score"] for path in Path("r/sort").glob("repeat-0-fold-*.json")
    ]
    assert len(accuracies) == 10
    expected = f"{100 * np.mean(accuracies):.2f} ± {100 * np.std(accuracies):.2f}"
    assert expected in result.output
    assert "73.30 ± 7.88" not in result.output  # one epoch is not what the paper did
    assert expected in Path("r/report.html").read_text()


def test_the_papers_column_stands_beside_the_papers_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(_: object, task: Task) -> object:
        return fold_result(task.pool, task.fold, 0.7)

    monkeypatch.setattr(lab_evaluate, "run_fold", at_once)
    for padding in ("none", "mass"):
        shown = run("evaluate", "--pools", "flow,sort", "--jobs", "1", "--out", padding, "--padding", padding)
        assert "82.48 ± 7.39" in shown.output, shown.output
        assert "leaks" in shown.output or padding == "none"
    other = run("evaluate", "--pools", "flow,sort", "--jobs", "1", "--points", "6")
    assert "82.48" not in other.output


def test_a_preset_holds_for_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_evaluate, "run_fold", lambda _, task: fold_result(task.pool, task.fold, 0.7))
    given = ["evaluate", "--preset", "strong", "--pools", "sum+mean+max", "--jobs", "1", "--out", "r"]
    result = run(*given, "--max-epochs", "7", "--norm", "output")
    assert result.exit_code == 0, result.output
    found = json.loads(Path("r/configuration.json").read_text())
    expected = {"backbone": "gin", "layers": [3], "channels": [32], "size": "append", "norm": "output", "hidden": 64}
    expected |= {"jumping": True, "standardise": True, "cosine": True, "max_epochs": 7, "patience": 7, "num_points": 8}
    assert found | expected == found
    grid = run(*given[:-1], "g", "--protocol", "errica")
    assert grid.exit_code == 0, grid.output
    assert (
        "errica protocol, backbone gin of 2 or 3 or 5 layers, each of them pooled, d=32 or 64"
        in Path("g/report.html").read_text()
    )


@pytest.mark.parametrize("protocol", ["paper", "frozen"])
def test_the_folds_are_named_and_can_be_fewer(protocol: str, tmp_path: Path) -> None:
    given = [
        "evaluate",
        "MUTAG",
        "--protocol",
        protocol,
        "--pools",
        "mean",
        "--jobs",
        "1",
        "--folds",
        "2",
        "--out",
        "r",
    ]
    given += ["--max-epochs", "1"] if protocol == "paper" else []
    (tmp_path / "splits").mkdir()
    result = run(*given)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in Path("r/mean").glob("*.json")) == [
        "repeat-0-fold-0.json",
        "repeat-0-fold-1.json",
    ]
    expected = "the first 2 of 10 folds, packaged, drawn with seed 0"
    assert f"MUTAG: {expected}.\n" in result.stderr
    assert expected in " ".join(result.stdout.split())
    assert expected in Path("r/report.html").read_text()
    assert json.loads(run(*given, "--json").stdout)["folds"] == expected
    Path("splits/MUTAG_splits.json").write_text(write_splits(draw_folds(load_graphs("MUTAG"), "folds", 3)))
    other = run(*given, "--repeats", "3", "--data", str(tmp_path), "--out", "s")
    assert (
        "folds, read from MUTAG_splits.json, not a published file; repeats 1 to 2 drawn with these seeds"
        in other.stderr
    )
    wrong = run(*given, "--folds", "11")
    assert wrong.exit_code != 0
    assert "11 folds; MUTAG has 10" in wrong.stderr


def test_json_has_the_numbers_of_the_table_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def some(_: object, task: Task) -> object:
        if task == Task("flow", 0, 3):
            raise ArithmeticError("Singular matrix")
        return fold_result(task.pool, task.fold, 0.5 + 0.01 * task.fold)

    monkeypatch.setattr(lab_evaluate, "run_fold", some)
    result = run("evaluate", "--pools", "flow,sum", "--jobs", "1", "--out", "r", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    rows = {row["pool"]: row for row in found["pools"]}
    assert rows["sum"]["score"]["mean"] == pytest.approx(0.545)
    assert (rows["flow"]["score"]["count"], rows["flow"]["failed"]) == (9, 1)
    assert [failure["reason"] for failure in found["failures"]] == ["ArithmeticError: Singular matrix"]
    assert "flow in fold 3 of repeat 0, with ArithmeticError: Singular matrix" in result.stderr
    assert "Traceback" not in result.stderr
    table = run("evaluate", "--pools", "flow,sum", "--jobs", "1", "--out", "r")
    assert table.exit_code == 1
    assert "9, 1 failed" in table.stdout
    assert "Singular matrix" in Path("r/report.html").read_text()


def test_nothing_but_failures_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> object:
        raise MemoryError

    monkeypatch.setattr(lab_evaluate, "run_fold", never)
    result = run("evaluate", "--pools", "sum", "--jobs", "1")
    assert result.exit_code == 1
    assert "Every fold failed; the first with MemoryError." in result.stderr


def test_evaluate_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(*SHORT, "--pools", "sum", "--out", "r")
    monkeypatch.setattr(lab_evaluate, "run_fold", lambda *_: pytest.fail("computed again"))
    second = run(*SHORT, "--pools", "sum", "--out", "r")
    assert second.exit_code == 0
    assert "10 of 10 folds are in r already." in second.stderr
    table = [line for line in first.output.splitlines() if line.startswith("sum")]
    assert table[0] in second.output


def test_folders_are_named_by_configuration() -> None:
    for seed in ("0", "0", "1"):
        assert run(*SHORT, "--pools", "sum", "--seed", seed).exit_code == 0
    assert len(list(Path("runs").glob("MUTAG-sgc-*"))) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SHORT, "--pools", "summ"], "Unknown pool 'summ'; there are flow, flow-attention"),
        ([*SHORT, "--jobs", "0"], "0 jobs; at least 1 is needed"),
        ([*SHORT, "--channels", "eight"], "--channels is 'eight'"),
        ([*SHORT, "--channels", "8,16"], "exactly one"),
        ([*SHORT, "--backbone", "gin", "--propagation", "raw"], "belongs to the backbone sgc"),
        ([*SHORT, "--layers", "3"], "--layers is an option of the backbones gin and gine; sgc has one layer"),
        ([*SHORT, "--data", "nowhere"], "nowhere, given as data, does not exist"),
        (["evaluate", "NO_SUCH_SET"], "Dataset 'NO_SUCH_SET' was not found"),
        (["evaluate", "../x"], "../x does not exist; pass a .csv, .tsv or .parquet file, or a TU dataset"),
        (["pool", "MUTAG", "out.csv"], "must end with .parquet or .npz"),
        (["pool", "MUTAG", "nowhere/out.npz"], "The folder nowhere does not exist"),
        (["pool", "NO_SUCH_SET", "out.npz"], "was not found"),
        (["pool", "MUTAG", "out.npz", "--points", "0"], "0 points"),
        (["data", "--data", "nowhere"], "does not exist"),
        (["bench", "--data", "nowhere"], "does not exist"),
        (["bench", "--trained", "MUTAG,SHAPES"], "No trained rows for SHAPES; there are MUTAG, ENZYMES"),
        (["bench", "--ott-steps", "-5"], "-5 steps of the paper's scheme; pass at least 1"),
        (["pool", "MUTAG", "out.npz", "--points", "2000000000"], "2,000,000,000 points; pass a number from 1 to"),
        ([*SHORT, "--points", "2000000000"], "2,000,000,000 points; pass a number from 1 to"),
        (["kept", "--points", "2000000000"], "2,000,000,000 points; pass a number from 1 to"),
        (["kept", "MUTAG", "--between", "--count", "12"], "of a class, and the kernel's accuracy needs 10 of each"),
        ([*SHORT, "--pools", "sum", "--epsilon", "0.5"], "epsilon would have no effect"),
        ([*SHORT, "--step-size", "2"], "step size is 2.0"),
        (["figures", "nothing"], "There is no figure 'nothing'"),
    ],
)
def test_mistakes_end_with_one_sentence_and_code_2(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.output
    assert list(Path().iterdir()) == []


def test_a_folder_of_another_configuration_is_refused() -> None:
    assert run(*SHORT, "--pools", "sum", "--out", "r").exit_code == 0
    result = run(*SHORT, "--pools", "sum", "--out", "r", "--norm", "output")
    assert result.exit_code == 2
    assert "norm is 'none' there and 'output' here" in result.stderr


def test_a_full_disk_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, result: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flowpool.lab.results.Store.save", full)
    result = run(*SHORT, "--pools", "sum", "--out", "r")
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert "Traceback" not in result.output


def test_an_interrupt_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lab_evaluate, "run_fold", interrupted)
    result = run(*SHORT, "--pools", "sum", "--out", "r")
    assert result.exit_code == 130
    assert "the same command continues from there" in result.stderr


def test_pool_reads_a_folder_and_writes_a_table(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path)
    result = run("pool", str(folder), "out.npz", "--points", "2")
    assert result.exit_code == 0, result.output
    assert "out.npz: 2 graphs, 2 points with 3 features each." in result.output
    with np.load("out.npz") as archive:
        assert archive["points"].shape == (2, 2, 3)
        assert archive["num_nodes"].tolist() == [2, 3]
        # Pooled points keep the mean of the nodes.
        dataset = load_graphs("TINY", str(folder))
        for graph in range(2):
            np.testing.assert_allclose(archive["points"][graph].mean(0), dataset[graph].x.mean(0), atol=1e-4)


def test_data_lists_every_known_dataset() -> None:
    result = run("data")
    assert result.exit_code == 0
    for name in ("MUTAG", "PTC_MR", "PROTEINS", "ENZYMES", "NCI1", "DD", "IMDB-BINARY", "Mutagenicity", "SHAPES"):
        assert name in result.output
    assert "the published graphs, packed differently" in result.output  # MUTAG from the grakel wheel


def test_kept_prints_and_writes_how_near_the_points_are() -> None:
    result = run("kept", "MUTAG", "--count", "6", "--out", "k")
    assert result.exit_code == 0, result.output
    rows = Path("k/kept.csv").read_text().splitlines()
    assert any(row.startswith("MUTAG,linear,flow,6,") for row in rows)
    assert "wegl" in result.output
    assert Path("k/kept.png").exists()


def test_kept_reads_every_dataset_before_it_measures_one() -> None:
    result = run("kept", "SHAPES", "NOWHERE", "--count", "6", "--out", "k")
    assert result.exit_code == 2
    assert "Dataset 'NOWHERE' was not found" in result.output
    assert "6/6" not in result.output and not Path("k").exists()


def test_kept_refuses_what_it_cannot_do() -> None:
    result = run("kept", "MUTAG", "--count", "0")
    assert result.exit_code == 2
    assert "0 graphs are asked for; pass at least 1." in result.output


def test_bench_keeps_what_it_measured_before_it_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> Iterator[Measurement]:
        yield Measurement("MUTAG", "flow, compiled", 0.1, 4.25, 1.0, 2.5, 1.0, 3.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(speed, "run_bench", stopped)
    result = run("bench", "--out", "b")
    assert result.exit_code != 0
    assert "4.25" in result.output
    assert "flow, compiled" in Path("b/bench.csv").read_text()


def test_bench_of_trained_features_is_a_table_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(names: list[str], _: object) -> Iterator[TrainedRow]:
        for name in names:
            yield TrainedRow(name, "FlowPool", 1, 9.25, 11.5, 1.75, 1.5, 0.5, 1.0, 0.25, 0.01, 0.02)

    monkeypatch.setattr(speed, "run_trained", measured)
    result = run("bench", "--trained", "MUTAG,DD", "--out", "b")
    assert result.exit_code == 0, result.output
    assert [line.split(",")[0] for line in Path("b/trained.csv").read_text().splitlines()] == ["case", "MUTAG", "DD"]
    assert "9.25" in result.output and "25.0%" in result.output
    assert not Path("b/bench.csv").exists()


@pytest.mark.parametrize(("columns", "lines"), [(40, 3), (24, 7)])
def test_a_table_without_room_becomes_paragraphs_and_loses_nothing(
    columns: int, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    table = make_table("pool", "accuracy", "p")
    table.add_row("flow-kmeans", "66.52", "0.99")
    table.add_row("mean", "66.49", "")
    show(table)
    printed = capsys.readouterr().out.splitlines()
    assert all(word in " ".join(printed) for word in ("flow-kmeans", "66.52", "0.99", "mean", "66.49"))
    assert len(printed) == lines and max(map(len, printed)) <= columns
