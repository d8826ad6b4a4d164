"""Where compiled kernels are kept: a folder that belongs to the user alone, with files that are used only as they were written."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import flowpool

PROGRAM = """
import numpy as np
from flowpool.kernels.machine.jit import entry

@entry
def double(values, result):
    for i in range(len(values)):
        result[i] = 2 * values[i]

result = np.zeros(3)
double(np.arange(3.0), result)
print(result.tolist())
"""


def run(folder: Path) -> tuple[str, str]:
    """What a process prints and logs that uses a small kernel, with the cache in a folder."""
    (folder / "program.py").write_text(PROGRAM)
    sources = str(Path(flowpool.__file__).parents[1])
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": sources}
    done = subprocess.run(
        [sys.executable, str(folder / "program.py")],
        capture_output=True, text=True, timeout=120, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "flowpool").rglob("*.nb?"))


@pytest.mark.skipif(os.name != "posix", reason="modes of files are those of POSIX")
def test_the_cache_belongs_to_the_user_alone(tmp_path: Path) -> None:
    base = tmp_path / "cache" / "flowpool"
    base.mkdir(parents=True)
    base.chmod(0o777)
    answer, log = run(tmp_path)
    assert answer == "[0.0, 2.0, 4.0]"
    assert "Compiling kernels" in log
    assert kept(tmp_path)
    assert stat.S_IMODE(base.stat().st_mode) == 0o700


def test_a_damaged_file_is_compiled_again(tmp_path: Path) -> None:
    run(tmp_path)
    assert "Compiling" not in run(tmp_path)[1]
    for path in kept(tmp_path):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
    answer, log = run(tmp_path)
    assert answer == "[0.0, 2.0, 4.0]"
    assert "Compiling kernels" in log


def test_a_cache_that_cannot_be_made_is_no_end(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    answer, log = run(tmp_path)
    assert answer == "[0.0, 2.0, 4.0]"
    assert "for this process only" in log
