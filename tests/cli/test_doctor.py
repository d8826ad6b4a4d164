"""The doctor finds what is wrong, and nothing where nothing is."""

import json

import numpy as np
import ot
import pytest
from typer.testing import CliRunner

import flowpool
from flowpool.cli.app import app
from flowpool.lab import doctor
from flowpool.lab.compile import num_calls


def test_all_is_well_here() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"], env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["healthy"]
    assert {check["name"]: check["verdict"] for check in found["checks"]} == {
        "torch engine": "ok",
        "compiled engine": "ok",
        "both engines agree": "ok",
        "gradient": "ok",
        "transport_pool": "ok",
        "layers for PyG": "ok",
    }
    assert found["packages"]["flowpool"] == flowpool.__version__


def test_its_oracle_is_that_of_pot() -> None:
    rng = np.random.default_rng(0)
    points, cloud = rng.normal(size=(3, 2)), rng.normal(size=(5, 2))
    plan = ot.sinkhorn(ot.unif(3), ot.unif(5), ot.dist(points, cloud), 0.5, stopThr=1e-14, numItermax=10_000)
    np.testing.assert_allclose(doctor._barycentres(points, cloud, 0.5), 3 * plan @ cloud, atol=1e-9)


def test_wrong_points_and_exceptions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = flowpool.flow_pool

    def wrong(nodes: object, *arguments: object, engine: str = "auto", **options: object) -> object:
        if engine == "compiled":
            raise OSError("the cache folder is read-only\nand more")
        pooled = original(nodes, *arguments, engine="torch", **options)  # type: ignore[arg-type]
        pooled.points.add_(0.1)
        return pooled

    monkeypatch.setattr(flowpool, "flow_pool", wrong)
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "140"})
    assert result.exit_code == 1
    assert "failed  torch engine: all OK; largest velocity left" in result.stdout
    assert "failed  compiled engine: OSError: the cache folder is read-only" in result.stdout
    assert "Please report it with this output." in result.stdout


def test_a_missing_package_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("numba", "torch_geometric") else "1")
    monkeypatch.setattr(doctor, "_gradient", lambda: (True, "not looked at"))
    found = doctor.examine()
    verdicts = {check.name: check.verdict for check in found.checks}
    assert found.is_healthy
    assert verdicts["compiled engine"] == verdicts["layers for PyG"] == "absent"


def test_compile_runs_every_kind_of_call() -> None:
    result = CliRunner().invoke(app, ["compile"], env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    assert "The kernels are compiled" in result.stdout
    assert num_calls() == 8
