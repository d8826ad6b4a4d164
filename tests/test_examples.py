"""Every example runs, and prints what its text claims."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowpool.lab.datasets.catalog import data_folder
from flowpool.lab.datasets.molecules import molecules_folder

EXAMPLES = Path(__file__).parent.parent / "examples"
WITHOUT_A_PICTURE = {"chemprop_esol.py", "molecules_from_csv.py", "train_with_lightning.py"}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # examples save their pictures where they are run


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    pictures = [path.read_bytes()[:4] for path in Path.cwd().glob("*.png")]
    assert pictures == ([] if name in WITHOUT_A_PICTURE else [b"\x89PNG"])
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    found = [float(value) for value in re.findall(pattern, text)]
    assert found, f"{pattern!r} is not in:\n{text}"
    return found


def test_train_mutag_learns() -> None:
    printed = run("train_mutag.py")
    losses = numbers(r"loss ([\d.]+);", printed)
    assert len(losses) == 10
    assert losses[-1] < 0.8 * losses[0]
    (accuracy,) = numbers(r"held-out accuracy ([\d.]+)", printed)
    assert accuracy > 0.7  # two thirds of the graphs belong to the larger class


def test_point_clouds_are_told_apart() -> None:
    printed = run("point_clouds.py")
    ring, disc = numbers(r"mean radius .*: ([\d.]+)", printed)
    assert ring > disc + 0.1
    assert numbers(r"same kind: (\d+) of 16", printed)[0] >= 14
    shares = [int(count) for count in re.findall(r"\d+", printed.split("by each pooled point:")[1].split("]")[0])]
    assert len(shares) == 4 and min(shares) > 0
    assert 0 < numbers(r"S_eps = ([\d.]+)", printed)[0] < 1


def test_node_masses_are_repetitions() -> None:
    printed = run("node_masses.py")
    assert max(numbers(r"(?:differ|points) by ([\de.+-]+)", printed)) < 1e-4
    assert "appended: 6 with masses, 6 nodes without" in printed
    before, after = numbers(r"training +([\d.]+)", printed)
    assert after < before / 10


def test_learned_cost_forgets_the_noise() -> None:
    printed = run("learned_cost.py")
    errors, weights = numbers(r"error ([\d.]+)", printed), numbers(r"noise ([\d.]+)", printed)
    assert errors[-1] < errors[0] / 4
    assert weights[-1] < 0.2


def test_the_paper_line_by_line_agrees_with_itself() -> None:
    printed = run("paper_line_by_line.py")
    exact, small, large = numbers(r"implicit, lambda .* ([\de.+-]+)", printed)
    assert exact < 1e-3 and exact < small < large
    assert numbers(r"unit circle: ([\d.]+)", printed)[0] < 0.2


def test_read_the_report_names_the_graphs() -> None:
    printed = run("read_the_report.py")
    assert "usual:    20 graphs: " in printed
    assert "1 EMPTY, 1 NONFINITE_INPUT" in printed
    assert "warning:  1 of 21 graphs are NONFINITE_INPUT (graph 3)" in printed
    assert "not affected: 19 of 19" in printed
    assert "NONFINITE_INPUT: graphs [3]." in printed
    assert "EMPTY: graphs [20]." in printed
    assert "raised:   20 of 20 graphs are MAX_STEPS" in printed
    shares = [float(share) for share in printed.rsplit("masses [", 1)[1].split("]")[0].split(",")]
    assert all(abs(share - 0.25) < 1e-6 for share in shares)


def test_digits_are_told_apart() -> None:
    printed = run("digits.py")
    assert "1797 images of 16 to 42 pixels -> (1797, 33)" in printed
    assert numbers(r"other images: ([\d.]+) %", printed)[0] > 95


def test_train_with_jax_learns() -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    printed = run("train_with_jax.py")
    losses = numbers(r"loss ([\d.]+)", printed)
    assert losses[-1] < losses[0] / 2
    assert numbers(r"apart: (\d+) of 32", printed)[0] >= 28


def test_the_papers_scheme_in_jax_comes_to_the_same_points() -> None:
    pytest.importorskip("ott", reason="OTT is not installed")
    printed = run("jax_beside_ott.py")
    few, some, many = numbers(r"points differ by ([\de.+-]+)", printed)
    assert few > some > many and many < 1e-6
    assert numbers(r"320 steps: differs by ([\de.+-]+)", printed)[0] < 1e-6


def test_train_with_lightning_learns_on_two_processes() -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    printed = run("train_with_lightning.py")
    losses = numbers(r"loss ([\d.]+)", printed)
    assert losses[-1] < 0.8 * losses[0]
    assert "2 processes" in printed


def test_chemprop_learns_solubility_with_each_aggregation() -> None:
    pytest.importorskip("chemprop", reason="Chemprop is not installed")
    folder = molecules_folder("ESOL", data_folder())
    if folder is None:
        pytest.skip("the molecules of ESOL are not in the data folder")
    errors = numbers(r"error ([\d.]+)", run("chemprop_esol.py", str(folder), "4"))
    assert len(errors) == 3 and max(errors) < 2.0  # the deviation of solubility is 2.1


def test_molecules_from_csv_become_a_table_that_predicts(tmp_path: Path) -> None:
    pytest.importorskip("rdkit", reason="RDKit is not installed")
    chains = [(carbon, oxygen) for carbon in range(1, 13) for oxygen in range(5)]
    lines = [f"{'C' * carbon + 'O' * oxygen},{oxygen - 0.6 * carbon}" for carbon, oxygen in chains]
    (tmp_path / "chains.csv").write_text("\n".join(lines))
    printed = run("molecules_from_csv.py", "chains.csv")
    assert "60 molecules of 1 to 16 atoms" in printed and "table: 60 rows of " in printed
    assert numbers(r"folds: ([\d.]+)", printed)[0] < 0.2 * numbers(r"mean: ([\d.]+)", printed)[0]


def test_all_examples_are_tested() -> None:
    tested = set(re.findall(r'run\("(\w+\.py)"', Path(__file__).read_text()))
    assert tested == {path.name for path in EXAMPLES.glob("*.py")}
