"""Where compiled kernels are kept: a folder that belongs to the user alone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import flowpool

PROGRAM = """
import gc
import numpy as np
from numba.core import event
from flowpool.kernels.machine.jit import entry

@entry
def double(values, result):
    for i in range(len(values)):
        result[i] = 2 * values[i]

class Listener(event.Listener):
    def on_start(self, event):
        print("collects" if gc.isenabled() else "rests")

    def on_end(self, event):
        pass

event.register("numba:compile", Listener())
result = np.zeros(3)
double(np.arange(3.0), result)
print(result.tolist())
print("collects" if gc.isenabled() else "rests")
gc.disable()
double(np.arange(3.0, dtype=np.float32), result)
print("collects" if gc.isenabled() else "rests")
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


@pytest.mark.skipif(os.name != "posix", reason="modes of files are those of POSIX")
def test_the_cache_belongs_to_the_user_alone(tmp_path: Path) -> None:
    base = tmp_path / "cache" / "flowpool"
    base.mkdir(parents=True)
    base.chmod(0o777)
    answer, log = run(tmp_path)
    assert "[0.0, 2.0, 4.0]" in answer
    assert "Compiling kernels" in log
    assert list(base.rglob("*.nbi"))
    assert stat.S_IMODE(base.stat().st_mode) == 0o700


def test_no_garbage_is_collected_while_a_kernel_is_compiled_and_afterwards_it_is_as_it_was(tmp_path: Path) -> None:
    answer, _ = run(tmp_path)
    assert answer.splitlines() == ["rests", "[0.0, 2.0, 4.0]", "collects", "rests", "rests"]
