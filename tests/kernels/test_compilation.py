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


def run(program: str, *arguments: str, timeout: float = 600, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {
        name: value for name, value in os.environ.items() if name not in ("FLOWPOOL_PLAIN", "FLOWPOOL_CHECKED")
    }
    variables["PYTHONPATH"] = str(Path(flowpool.__file__).parents[1])
    return subprocess.run(
        [sys.executable, str(PROGRAMS / program), *arguments], capture_output=True, text=True, timeout=timeout,
        check=False, env={**variables, **environment},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the kernels may have to be compiled
@pytest.mark.parametrize("way", ["plain", "checked"])
def test_every_way_to_compile_gives_the_same_bits_and_passes_the_tests_of_the_kernels(way: str, tmp_path: Path) -> None:
    """In checked mode an access outside of its array would end the sweep, or a test, with an IndexError."""
    found = {}
    for name in ("quick", way):
        target = tmp_path / f"{name}.npz"
        done = run("sweep.py", str(target), **WAYS[name])
        assert done.returncode == 0, f"{name}: {done.stderr[-3000:]}"
        assert done.stdout.split()[0] == name
        found[name] = dict(np.load(target))
    quick = found["quick"]
    assert quick.keys() == found[way].keys()
    for name, values in quick.items():
        np.testing.assert_array_equal(found[way][name], values, err_msg=f"{name} by {way}")
    # Graphs of every kind were met.
    status = quick["status"]
    assert len(status) >= 200 and np.isin(status, [0, 3, 4]).all()
    assert (status == 0).sum() > 100 and (status == 4).sum() > 5
    assert all(np.isfinite(values).all() for values in quick.values())

    tests = [str(Path(__file__).with_name(f"test_{name}.py")) for name in ("batch", "frame", "kernels", "memory")]
    done = run("tests.py", *tests, **WAYS[way])
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.split()[0] == way and " passed" in done.stdout


def test_an_access_outside_raises_in_checked_mode() -> None:
    done = run("outside.py", FLOWPOOL_CHECKED="1")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["read", "write", "lane", "table", "inside"]


def lines(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]


def test_a_damaged_cache_is_compiled_again_and_mended(tmp_path: Path) -> None:
    found = lines(run("cache.py", XDG_CACHE_HOME=str(tmp_path)))
    assert all(right == "right" for _, right, *_ in found)
    assert found[0][2:] == ["fresh", "compiling", "1"] and found[1][2:] == ["disk", "-", "0"]
    damaged = [line for line in found[2:] if line[0] not in ("mended", "vouched.nbi")]
    assert [line[0].split(".")[0] for line in damaged] == 2 * ["truncated", "garbled", "emptied", "removed", "unsealed"]
    assert all(line[2] == "fresh" for line in damaged)
    assert all(line[2:] == ["disk", "-", "0"] for line in found if line[0] == "mended")
    # A file that its seal vouches for and that cannot be read all the same: for this process only.
    assert found[-1][0] == "vouched.nbi" and found[-1][2] == "fresh"
    folder = tmp_path / "flowpool"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not [path for path in folder.rglob("*") if path.is_file() and path.stat().st_mode & 0o022]


def test_a_full_disk_or_no_folder_means_compiling_for_this_process(tmp_path: Path) -> None:
    assert lines(run("cache.py", "full", XDG_CACHE_HOME=str(tmp_path))) == [
        ["full", "right", "fresh", "compiling", "2"]
    ]
    nowhere = tmp_path / "file"
    nowhere.write_text("a file where the folder should be")
    found = lines(run("cache.py", "nowhere", XDG_CACHE_HOME=str(nowhere)))
    assert found == [["nowhere", "right", "fresh", "compiling", "1"]]
