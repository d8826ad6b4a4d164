"""The three ways to compile: quick, plain, and with every access checked. They give the same answers.

Each way is a process of its own, which pools the same few hundred random graphs and differentiates them; and the cache on
disk, which may be damaged in any way.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import flowpool

PROGRAMS = Path(__file__).parent / "programs"
WAYS = {"quick": {}, "plain": {"FLOWPOOL_PLAIN": "1"}, "checked": {"FLOWPOOL_CHECKED": "1"}}


def run(program: str, *arguments: str, timeout: float = 280, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {
        name: value for name, value in os.environ.items() if name not in ("FLOWPOOL_PLAIN", "FLOWPOOL_CHECKED")
    }
    variables["PYTHONPATH"] = str(Path(flowpool.__file__).parents[1])
    return subprocess.run(
        [sys.executable, str(PROGRAMS / program), *arguments], capture_output=True, text=True, timeout=timeout,
        check=False, env={**variables, **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, np.ndarray]]:
    """What each way to compile makes of the same graphs."""
    found = {}
    for way, switch in WAYS.items():
        target = tmp_path_factory.mktemp("swept") / f"{way}.npz"
        done = run("sweep.py", str(target), **switch)
        assert done.returncode == 0, f"{way}: {done.stderr[-3000:]}"
        assert done.stdout.split()[0] == way
        found[way] = dict(np.load(target))
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["plain", "checked"])
def test_every_way_to_compile_gives_the_same_answers(swept: dict[str, dict[str, np.ndarray]], way: str) -> None:
    quick, other = swept["quick"], swept[way]
    assert quick.keys() == other.keys() and len(quick["status"]) >= 200
    np.testing.assert_array_equal(other["status"], quick["status"])
    for name in ("points", "nodes", "masses"):
        size = np.abs(quick[name]).max()
        np.testing.assert_allclose(other[name], quick[name], atol=1e-12 * size, rtol=1e-12, err_msg=name)


def test_the_sweep_meets_graphs_of_every_kind(swept: dict[str, dict[str, np.ndarray]]) -> None:
    status = swept["quick"]["status"]
    assert np.isin(status, [0, 3, 4]).all() and (status == 0).sum() > 100 and (status == 4).sum() > 5
    assert np.isfinite(swept["quick"]["points"]).all() and np.isfinite(swept["quick"]["nodes"]).all()


def test_an_access_outside_raises_in_checked_mode() -> None:
    done = run("outside.py", FLOWPOOL_CHECKED="1")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["read", "write", "lane", "table", "single", "inside"]
