"""``flowpool evaluate`` on files of one's own, from the file to the report; and options that are declared once."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flowpool.cli.app import app
from flowpool.lab.options import GROUPS

SHORT = ["--max-epochs", "2", "--folds", "2", "--workers", "1", "--out", "r", "--pools", "sum,mean"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLOWPOOL_DATA", raising=False)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["evaluate", *arguments], env={"COLUMNS": "140"})


def write_molecules() -> None:
    """Chains, whose target is their length; one stands there twice, one is unreadable."""
    rows = [f"{'C' * size}O,{size}.5,{'low' if size < 20 else 'high'}" for size in range(1, 41)]
    Path("m.csv").write_text("\n".join(["smiles,y,c", *rows, "OC,1.5,low", "C(,3.5,low", ""]))


def test_molecules_from_a_table_to_a_report() -> None:
    pytest.importorskip("rdkit", reason="RDKit is not installed")
    write_molecules()
    given = ["m.csv", "--smiles", "smiles", "--target", "y", "--preset", "molecules", "--split", "random", *SHORT]
    result = run(*given)
    assert result.exit_code == 0, result.output
    left_out = "m.csv: 1 row is left out, whose molecule RDKit cannot read (line 43: 'C(')."
    assert result.stderr.count(left_out) == 1
    assert "since they or their equals are tested" in result.stderr
    assert "m: the first 2 of 5 folds, drawn with seed 0 (random)." in result.stderr
    assert "rmse" in result.stdout and "cannot be told from" in result.stdout
    page = Path("r/report.html").read_text()
    assert "Differences to sum" in page and "whose molecule RDKit cannot read" in page
    found = json.loads(run(*given, "--json").stdout)
    assert found["metric"] == {"name": "rmse", "lower_is_better": True}
    scores = [row["score"]["mean"] for row in found["pools"]]
    assert scores == sorted(scores)  # the smallest error first
    shown = run("--show", "r")
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[-3:] == result.stdout.splitlines()[-3:]
    assert left_out in shown.stderr
    ranked = run(
        "m.csv", "--smiles", "smiles", "--target", "c", "--metric", "auc", *SHORT[:-4], "--out", "a", "--pools", "sum"
    )
    assert ranked.exit_code == 0, ranked.output
    assert "auc" in ranked.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m.csv"], "m.csv: say which column it is with --smiles COLUMN"),
        (["m.csv", "--smiles", "smiles"], "m.csv: say which column it is with --target COLUMN"),
        (["s.parquet", "--nodes", "x"], "s.parquet: say which column it is with --target COLUMN"),
        (["MUTAG", "--nodes", "x"], "--nodes is an option for a Parquet file; MUTAG is none"),
        (["MUTAG", "--split", "c"], "--split c: MUTAG has no columns; pass folds, random, scaffold, stratified"),
        (
            ["MUTAG", "--metric", "rmse"],
            "The targets of MUTAG are classes, of which rmse is no measure; pass accuracy, auc",
        ),
        (["MUTAG", "--backbone", "gine"], "The edges of this dataset have no features, which the backbone gine needs"),
        (["no/such.csv", "--smiles", "s", "--target", "y"], "no/such.csv does not exist"),
        (["MUTAG", "--address", "auto"], "--address auto needs --on ray"),
        (["--show", "nowhere"], "nowhere is no result folder: it has no configuration.json"),
    ],
)
def test_what_does_not_belong_together_is_one_sentence(arguments: list[str], message: str) -> None:
    if arguments[0] == "m.csv":
        write_molecules()
    result = run(*arguments, "--workers", "1") if arguments[0] != "--show" else run(*arguments)
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert "Traceback" not in result.output


def shows(text: str, flag: str) -> bool:
    """Whether the help has a line for the option."""
    return any(line.strip(" │*").startswith(flag) for line in text.splitlines())


def test_every_option_is_declared_once_and_shown_by_help_all() -> None:
    few, all_of_them = run("--help").stdout, run("--help-all").stdout
    for kind, _, hidden in GROUPS:
        for field in fields(kind):
            if "about" not in field.metadata:
                continue
            flag = (field.metadata["flag"] or f"--{field.name.replace('_', '-')}").partition("/")[0]
            assert shows(all_of_them, flag)
            assert shows(few, flag) is not hidden
    assert len(few.splitlines()) < 60 < len(all_of_them.splitlines())
