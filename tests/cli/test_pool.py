"""``flowpool pool``: tables of any size, interrupted anywhere, on this machine or on Ray."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from clusters import two_cores
from pyarrow import parquet
from typer.testing import CliRunner, Result

import flowpool
from flowpool.arrow import pool_arrow, pooled_reference
from flowpool.bulk import job as jobs
from flowpool.bulk import sources
from flowpool.bulk.job import Job, Settings, make_job, sample_nodes
from flowpool.bulk.sources import ParquetSource
from flowpool.bulk.store import Store
from flowpool.cli.app import app
from flowpool.lab.datasets import load_dataset

WIDTH, FILES, ROWS = 3, 6, 7


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLOWPOOL_DATA", raising=False)


def make_table(count: int = FILES * ROWS) -> Any:
    """Graphs of 4 to 9 nodes with masses, a name that may be null, and a category."""
    generator = np.random.default_rng(0)
    sizes = generator.integers(4, 10, count)
    graphs = [generator.standard_normal((size, WIDTH)).astype(np.float32).tolist() for size in sizes]
    return pa.table(
        {
            "name": [None if row % 5 == 0 else f"g{row}" for row in range(count)],
            "x": pa.array(graphs, pa.list_(pa.list_(pa.float32(), WIDTH))),
            "w": pa.array([[1.0 + k for k in range(size)] for size in sizes], pa.list_(pa.float32())),
            "kind": pa.array([f"k{row % 4}" for row in range(count)]).dictionary_encode(),
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The table in six files."""
    inputs = tmp_path / "in"
    inputs.mkdir()
    for place in range(FILES):
        parquet.write_table(make_table().slice(place * ROWS, ROWS), inputs / f"{place}.parquet", row_group_size=4)
    return inputs


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["pool", *arguments], env={"COLUMNS": "140"})


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if not file.name.startswith(".")}


def test_a_folder_of_files_becomes_a_folder_of_parts(folder: Path) -> None:
    result = run("in", "out", "--masses", "w", "--points", "2", "--seed", "3", "--divergence")
    assert result.exit_code == 0, result.output
    assert result.stdout == "out: 42 graphs, 2 points with 3 features each.\n"
    found = parquet.read_table("out")
    expected = pool_arrow(make_table(), masses="w", num_points=2, seed=3, divergence=True)
    assert found.column_names == ["name", "kind", "points", "status", "residual", "divergence"]
    assert found.drop_columns("divergence").to_pylist() == expected.drop_columns("divergence").to_pylist()
    # Divergences are computed by torch, to rounding in any company.
    np.testing.assert_allclose(found["divergence"].to_numpy(), expected["divergence"].to_numpy(), rtol=1e-12)
    assert torch.equal(pooled_reference(found.schema), flowpool.references.normal(WIDTH, 2, 3).double())


def test_one_file_and_npz_hold_what_the_folder_holds(folder: Path) -> None:
    parquet.write_table(make_table().drop_columns(["w", "kind"]), "one.parquet")
    for output in ("out", "out.parquet", "out.npz"):
        assert run("one.parquet", output, "--points", "2").exit_code == 0
    parts, joined = parquet.read_table("out"), parquet.read_table("out.parquet")
    assert joined.equals(parts, check_metadata=True)
    with np.load("out.npz") as archive:
        assert np.array_equal(archive["points"], np.array(parts["points"].to_pylist(), np.float32))
        assert np.array_equal(archive["reference"], pooled_reference(parts.schema))
        assert archive["name"].tolist() == [name or "" for name in parts["name"].to_pylist()]
        assert archive["status"].tolist() == parts["status"].to_pylist()
        assert json.loads(str(archive["about"]))["epsilon"] == 0.1
    assert sorted(path.name for path in Path().iterdir()) == ["in", "one.parquet", "out", "out.npz", "out.parquet"]


@pytest.mark.parametrize("at_once", [3, 5])
def test_large_row_groups_are_cut_and_small_ones_joined(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(sources, "_MOST_ROWS", 5)
    monkeypatch.setattr(sources, "_AT_ONCE", at_once)
    for size in (100, 2):
        parquet.write_table(make_table(), "one.parquet", row_group_size=size)
        source = ParquetSource.of(Path("one.parquet"))
        assert [part.stop - part.start for part in source.parts] == [5] * 8 + [2]
        some = [source.parts[place] for place in (1, 2, 5, 8)]
        rows: dict[int, list[Any]] = {}
        for part, batch in source.read(some):
            rows.setdefault(part.number, []).extend(batch["name"].to_pylist())
        names = make_table()["name"].to_pylist()
        assert [name for batch in source.batches(0, 6, 8) for name in batch["name"].to_pylist()] == names[6:8]
        assert rows == {part.number: names[part.start : part.stop] for part in some}


def test_parts_are_cut_by_what_rows_take_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = pa.array([[[0.0] * WIDTH] * 100] * 20, pa.list_(pa.list_(pa.float64(), WIDTH)))
    parquet.write_table(pa.table({"x": zeros}), "zeros.parquet")  # next to nothing in the file
    monkeypatch.setattr(sources, "_MOST_BYTES", 5 * 100 * WIDTH * 8)
    assert ParquetSource.of(Path("zeros.parquet")).rows_per_part == 5


def test_parts_are_cut_by_what_the_pooled_rows_take_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("in", "whole").exit_code == 0
    monkeypatch.setattr(sources, "_MOST_BYTES", 8 * 5 * WIDTH * 4)
    source = replace(ParquetSource.of(folder), rows_per_part=ROWS)  # which fit into a part themselves
    job, _ = make_job(source, Settings(), Path("out"))
    assert [part.stop - part.start for part in job.source.parts] == [4, 3] * FILES
    assert run("in", "out").exit_code == 0
    assert parquet.read_table("out").equals(parquet.read_table("whole"))


class Killed(BaseException):
    """Nothing catches it, as nothing catches kill -9."""


@pytest.mark.parametrize("moment", [0, 1, 4, 5])
@pytest.mark.parametrize("where", ["before the name", "after the name"])
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, moment: int, where: str
) -> None:
    assert run("in", "whole").exit_code == 0
    saved, save = [], Store.save
    with monkeypatch.context() as patch:

        def killed(*_: Any) -> None:
            raise Killed

        def interrupted(self: Store, part: Any, table: Any) -> None:
            if len(saved) == moment and where == "before the name":
                patch.setattr(os, "replace", killed)
            save(self, part, table)
            if len(saved) == moment:
                raise Killed
            saved.append(part)

        patch.setattr(Store, "save", interrupted)
        with pytest.raises(Killed):
            run("in", "out")
    done = moment + (where == "after the name")
    assert len(list(Path("out").glob("part-*.parquet"))) == done
    counted: list[Any] = []
    monkeypatch.setattr(Store, "save", lambda self, part, table: (counted.append(part), save(self, part, table)))
    result = run("in", "out")
    assert result.exit_code == 0, result.output
    assert len(counted) == FILES - done
    assert (f"{done * ROWS} of 42 graphs are in out already." in result.stderr) == (done > 0)
    assert contents(Path("out")) == contents(Path("whole"))


def test_kill_9_loses_nothing(folder: Path) -> None:
    assert run("in", "whole.parquet").exit_code == 0
    program = (
        "import os, time; from flowpool.bulk.store import Store; save = Store.save\n"
        "def slow(self, part, table): save(self, part, table); time.sleep(0.3)\n"
        "Store.save = slow\n"
        "from flowpool.cli.app import app; app(['pool', 'in', 'out.parquet'])"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(flowpool.__file__).parents[1])}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None and len(list(Path().glob("out.parquet.parts/part-*"))) < 2:
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not Path("out.parquet").exists()
    assert run("in", "out.parquet").exit_code == 0
    assert Path("out.parquet").read_bytes() == Path("whole.parquet").read_bytes()
    assert not Path("out.parquet.parts").exists()


def test_a_second_run_into_the_same_output_is_refused(folder: Path) -> None:
    assert run("in", "whole.parquet").exit_code == 0
    job, store = make_job(ParquetSource.of(Path("in")), Settings(), Path("out.parquet"))
    with store.alone():
        list(job.run(job.source.parts[:2], store))
        second = run("in", "out.parquet")
    assert second.exit_code == 1
    assert second.stderr.startswith(
        "14 of 42 graphs are in out.parquet.parts already.\nError: Another run is writing to"
    )
    assert run("in", "out.parquet").exit_code == 0
    assert Path("out.parquet").read_bytes() == Path("whole.parquet").read_bytes()
    assert not list(Path().glob(".*.lock"))


def test_bad_rows_are_counted(folder: Path) -> None:
    graph = make_table(1)["x"][0].as_py()
    rows = [graph, None, [], [[float("nan")] * WIDTH, *graph], graph, None]
    parquet.write_table(pa.table({"x": pa.array(rows, pa.list_(pa.list_(pa.float32())))}), "bad.parquet")
    result = run("bad.parquet", "out")
    assert result.exit_code == 0
    assert parquet.read_table("out")["status"].to_pylist() == [
        "OK", "NULL", "EMPTY", "NONFINITE_INPUT", "OK", "NULL"
    ]  # fmt: skip
    assert "1 graph is NONFINITE_INPUT." in result.stderr
    assert "2 graphs are NULL." in result.stderr
    assert "EMPTY" not in result.stderr and "OK" not in result.stderr


def test_a_table_without_rows_gives_one_without_rows() -> None:
    parquet.write_table(make_table().slice(0, 0), "none.parquet")
    for output in ("out", "out.parquet"):
        assert run("none.parquet", output).exit_code == 0
        assert parquet.read_table(output).schema.names == ["name", "w", "kind", "points", "status", "residual"]


def test_references_are_drawn_fitted_or_given(folder: Path) -> None:
    assert run("in", "fitted", "--reference", "kmeans", "--points", "3", "--seed", "1").exit_code == 0
    fitted = pooled_reference(parquet.read_schema("fitted/part-000000.parquet"))
    nodes = torch.cat([torch.tensor(graph) for graph in make_table()["x"].to_pylist()]).double()
    centred = nodes - nodes.mean(0)
    standard = centred / centred.square().sum(-1).mean().sqrt()
    nearest = torch.cdist(standard, fitted).argmin(1)  # there are fewer nodes than k-means may see: it saw them all
    means = torch.stack([standard[nearest == point].mean(0) for point in range(3)])
    torch.testing.assert_close(fitted, means, rtol=0, atol=1e-6)
    np.save("given.npy", fitted)
    for name, source in (("again", "fitted"), ("npy", "given.npy")):
        assert run("in", name, "--reference", source, "--points", "3").exit_code == 0
        assert parquet.read_table(name).equals(parquet.read_table("fitted"))


def test_a_sample_is_even_and_of_one_pass() -> None:
    values = np.arange(30_000, dtype=np.float32)
    column = pa.array([[[v]] for v in values], pa.list_(pa.list_(pa.float32(), 1)))
    batches = pa.table({"x": column}).to_batches(max_chunksize=999)
    found = sample_nodes(iter(batches), "x", 1, 3000, seed=0)[:, 0]
    assert len(found) == len(found.unique()) == 3000
    # Each third of the rows gets its third; the deviation of a count is about 26.
    counts = torch.histc(found, 3, 0, 30_000)
    assert float((counts - 1000).abs().max()) < 5 * 26
    one_batch = sample_nodes(iter(pa.table({"x": column}).to_batches()), "x", 1, 3000, seed=0)[:, 0]
    assert torch.equal(found, one_batch)


def test_a_fitted_reference_is_not_fitted_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("in", "out", "--reference", "kmeans", "--points", "2")
    assert run(*arguments).exit_code == 0
    before = contents(Path("out"))
    Path("out/part-000002.parquet").unlink()
    monkeypatch.setattr(jobs.references, "kmeans", lambda *_: pytest.fail("fitted again"))
    assert run(*arguments).exit_code == 0
    assert contents(Path("out")) == before


def test_datasets_are_tables_too() -> None:
    result = run("MUTAG", "out.npz", "--points", "2")
    assert result.exit_code == 0, result.output
    dataset = load_dataset("MUTAG")
    reference = flowpool.references.normal(dataset.num_features, 2)
    with np.load("out.npz") as archive:
        assert archive["graph"].tolist() == list(range(len(dataset)))
        assert np.array_equal(archive["label"], dataset.labels.numpy())
        assert np.array_equal(archive["num_nodes"], dataset.node_ptr.diff().numpy())
        pooled = flowpool.flow_pool(dataset.features, ptr=dataset.node_ptr, reference=reference)
        assert np.array_equal(archive["points"], pooled.points.numpy())


def test_molecules_are_read_like_those_that_are_evaluated() -> None:
    pytest.importorskip("rdkit", reason="RDKit is not installed")
    Path("m.csv").write_text("s,y,z\nCCO,1.5,2\nC(,1,1\nc1ccccc1O,2.5,3\n")
    result = run("m.csv", "out.parquet", "--smiles", "s", "--target", "y,z", "--points", "2")
    assert result.exit_code == 0, result.output
    assert "m.csv: 1 row is left out, whose molecule RDKit cannot read (line 3: 'C(')." in result.stderr
    rows = parquet.read_table("out.parquet").select(["place", "y", "z", "num_nodes"]).to_pylist()
    assert [list(row.values()) for row in rows] == [["line 2 (CCO)", 1.5, 2, 3], ["line 4 (c1ccccc1O)", 2.5, 3, 7]]
    assert run("m.csv", "alone.parquet", "--smiles", "s", "--points", "2").exit_code == 0  # nothing but molecules
    for arguments, message in (
        (["m.csv"], "m.csv: say which column it is with --smiles COLUMN"),
        (["MUTAG", "--smiles", "s"], "--smiles is an option for a CSV file; MUTAG is none"),
    ):
        wrong = run(arguments[0], "x.parquet", *arguments[1:])
        assert wrong.exit_code == 2 and message in wrong.stderr


def test_masses_of_a_dataset_are_used() -> None:
    assert run("DIGITS", "out.npz", "--points", "2").exit_code == 0
    digits = load_dataset("DIGITS")
    reference = flowpool.references.normal(2, 2)
    pooled = flowpool.flow_pool(digits.features, ptr=digits.node_ptr, masses=digits.masses, reference=reference)
    with np.load("out.npz") as archive:
        np.testing.assert_allclose(archive["points"], pooled.points.numpy(), atol=1e-5)


def test_other_settings_or_another_input_are_refused(folder: Path) -> None:
    assert run("in", "out").exit_code == 0
    before = contents(Path("out"))
    for change, message in (
        (["--epsilon", "0.2"], "epsilon is 0.1 there and 0.2 here"),
        (["--points", "4"], "num_points is 5 there and 4 here"),
        (["--reference", "kmeans"], "reference is 'normal' there and 'kmeans' here"),
    ):
        result = run("in", "out", *change)
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
        assert message in result.stderr
    parquet.write_table(make_table().slice(1, ROWS), "in/3.parquet", row_group_size=4)
    result = run("in", "out")
    assert result.exit_code == 2
    assert "its input is not the one given now" in result.stderr
    assert contents(Path("out")) == before


def test_a_full_disk_is_told_in_one_line_and_nothing_is_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("in", "whole").exit_code == 0
    write, written = parquet.write_table, []

    def full(table: Any, path: Path, **options: Any) -> None:
        written.append(path)
        if len(written) == 3:
            path.write_bytes(b"PAR1")
            raise OSError(
                28, "Error writing bytes to file. Detail: [errno 28] No space left on device"
            )  # as Arrow says it
        write(table, path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(parquet, "write_table", full)
        result = run("in", "out")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: out/part-000002.parquet cannot be written: No space left on device. "
        "Finished parts are in out; the same command continues from there.\n"
    )
    assert len(result.stderr.strip().splitlines()) == 1
    assert len(contents(Path("out"))) == 3
    assert run("in", "out").exit_code == 0
    assert contents(Path("out")) == contents(Path("whole"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["in", "out", "--nodes", "y"], "0 columns 'y'; one is needed. Its columns: 'name', 'x', 'w', 'kind'"),
        (["in", "out", "--nodes", "w"], "Column 'w' is of type list<.*float>; it must hold lists of lists"),
        (["in", "out", "--masses", "name"], "Column 'name' is of type string; it must hold lists of numbers"),
        (["in", "out", "--points", "0"], "0 points"),
        (["in", "out", "--epsilon", "-1"], "epsilon is -1"),
        (["in", "out", "--reference", "nowhere.npy"], "nowhere.npy does not exist"),
        (["in", "out", "--reference", "bad.npy"], "bad.npy holds no reference"),
        (["in", "out", "--reference", "none.npy", "--points", "1"], "none.npy holds no reference"),
        (["in", "out", "--reference", "wide.npy"], "have 3 features, but the reference has 4"),
        (["in", "out", "--reference", "wide.npy", "--points", "2"], "has 5 points, but --points is 2"),
        (["in", "out", "--reference", "in"], "holds no parts"),
        (["in", "in/out"], "lies inside it"),
        (["in/0.parquet", "in/../in/0.parquet"], "is the input in/0.parquet"),
        (["in", "full"], "full holds other files"),
        (["in", "out.csv"], "must end with .parquet or .npz, or be a folder"),
        (["in", "out.npz"], "Column 'w' is of type list<.*>, but an .npz file"),
        (["in", "nowhere/out"], "The folder nowhere does not exist"),
        (["in", "out", "--address", "auto"], "--address auto needs --on ray"),
        (["empty.parquet", "out"], "The folder empty.parquet holds no Parquet files."),
        (["nowhere.parquet", "out"], "nowhere.parquet does not exist"),
        (["text.parquet", "out"], r"text.parquet cannot be read as Parquet: .*[^.]\.$"),
        (["mixed", "out"], "1.parquet has other columns than mixed/0.parquet: 'x' is int64 there and"),
    ],
)
def test_mistakes_end_with_one_sentence_and_code_2(folder: Path, arguments: list[str], message: str) -> None:
    Path("bad.npy").write_text("no array")
    np.save("wide.npy", np.random.default_rng(0).standard_normal((5, 4)))
    np.save("none.npy", np.zeros((1, 0)))
    Path("full").mkdir()
    Path("empty.parquet").mkdir()
    Path("full/letter.txt").touch()
    Path("text.parquet").write_text("not a table")
    Path("mixed").mkdir()
    parquet.write_table(make_table(2).select(["x"]), "mixed/0.parquet")
    parquet.write_table(pa.table({"x": [1, 2]}), "mixed/1.parquet")
    before = sorted(map(str, Path().rglob("*")))
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert len(result.stderr.strip().splitlines()) == 1
    assert re.search(message, result.stderr), result.stderr
    assert sorted(map(str, Path().rglob("*"))) == before


def test_a_damaged_file_is_told_with_its_name(folder: Path) -> None:
    whole = bytearray(Path("in/2.parquet").read_bytes())
    whole[4:400] = bytes(396)
    Path("in/2.parquet").write_bytes(whole)
    result = run("in", "out")
    assert result.exit_code == 1, result.output
    assert "2.parquet" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert len(list(Path("out").glob("part-*"))) == 2


class TestRay:
    """With a real cluster on this machine."""

    @pytest.fixture(scope="class", autouse=True)
    def cluster(self) -> Any:
        with two_cores():
            yield

    def test_gives_the_bytes_of_one_machine(self, folder: Path) -> None:
        assert run(str(folder), "local", "--masses", "w").exit_code == 0
        for _ in range(2):  # the second time nothing is left to do
            result = run(str(folder), str(Path("there").resolve()), "--masses", "w", "--on", "ray")
            assert result.exit_code == 0, result.output
            assert contents(Path("there")) == contents(Path("local"))

    def test_a_killed_worker_is_replaced(self, folder: Path) -> None:
        import psutil

        from flowpool.bulk import on_ray

        assert run(str(folder), "whole").exit_code == 0
        job, store = make_job(ParquetSource.of(folder), Settings(), Path("out").resolve())
        killed = 0
        for _ in on_ray.run(job, job.source.parts, store):
            if not killed:
                for process in psutil.Process().children(recursive=True):  # of this cluster, not of another one
                    if "MapWorker" in " ".join(process.cmdline()):
                        process.kill()
                        killed += 1
        assert killed
        assert contents(Path("out")) == contents(Path("whole"))

    def test_rows_that_kill_every_worker_end_the_run(self, folder: Path) -> None:
        from flowpool.bulk import on_ray

        class Deadly(Job):
            def pool(self, table: Any) -> Any:
                if "g31" in table["name"].to_pylist():
                    os._exit(1)  # as if the system had killed it for want of memory
                return super().pool(table)

        job, store = make_job(ParquetSource.of(folder), Settings(), Path("out").resolve())
        with pytest.raises(OSError, match=r"^A worker died 4 times") as caught:
            list(on_ray.run(Deadly(job.source, job.settings, job.reference), job.source.parts, store))
        assert len(str(caught.value).splitlines()) == 1
        missing = {part.number for part in store.missing(job.source.parts)}
        assert 4 in missing and len(missing) <= 2  # with one that another worker was at when the run ended

    def test_a_failing_worker_is_told_in_one_line(self, folder: Path) -> None:
        job, store = make_job(ParquetSource.of(folder), Settings(), Path("out").resolve())
        parts = job.source.parts
        (folder / "3.parquet").unlink()
        from flowpool.bulk import on_ray

        with pytest.raises(OSError, match=r"A worker failed: .*3\.parquet") as caught:
            list(on_ray.run(job, parts, store))
        assert len(str(caught.value).splitlines()) == 1

    def test_pool_arrow_is_a_batch_function(self, folder: Path) -> None:
        import ray.data

        rows = ray.data.read_parquet(str(folder)).map_batches(
            pool_arrow, batch_format="pyarrow", batch_size=5, fn_kwargs={"num_points": 2}
        )
        found = {row["name"]: row["points"] for row in rows.take_all() if row["name"]}
        expected = {row["name"]: row["points"] for row in pool_arrow(make_table(), num_points=2).to_pylist()}
        assert len(found) == 33
        for name, points in found.items():
            assert np.array_equal(np.array([list(point) for point in points]), np.array(expected[name]))


@pytest.mark.parametrize("address", ["auto", "127.0.0.1:1"])
def test_a_cluster_that_cannot_be_reached_is_told_in_one_line(
    folder: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # what auto means, though this machine may run a cluster
    result = run("in", "out", "--on", "ray", "--address", address)
    assert result.exit_code == 1
    assert f"No Ray cluster was reached at {address}" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
