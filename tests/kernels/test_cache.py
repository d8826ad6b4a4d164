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


SLOW = """
import time
import numpy as np
from numba.core import event
from flowpool.kernels.machine.jit import entry

@entry
def double(values, result):
    for i in range(len(values)):
        result[i] = 2 * values[i]

class Listener(event.Listener):
    def on_start(self, event):
        time.sleep(2)

    def on_end(self, event):
        pass

event.register("numba:compile", Listener())
result = np.zeros(3)
double(np.arange(3.0), result)
print(result.tolist(), "disk" if sum(double._dispatcher.stats.cache_hits.values()) else "fresh")
"""

RAISING = """
import numpy as np
from flowpool.kernels.machine.jit import entry

@entry
def root(values):
    if values[0] < 0.0:
        raise ValueError("the kernel's own")
    return np.sqrt(values[0])

print(root(np.full(1, 4.0)))
for _ in range(2):
    try:
        root(np.full(1, -1.0))
    except ValueError as error:
        print(error)
print(root(np.full(1, 9.0)), root._uncached)
"""


def environment_of(folder: Path, **more: str) -> dict[str, str]:
    sources = str(Path(flowpool.__file__).parents[1])
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": sources, **more}


def run(folder: Path, program: str = PROGRAM, **more: str) -> tuple[str, str]:
    """What a process prints and logs that uses a small kernel, with the cache in a folder."""
    (folder / "program.py").write_text(program)
    environment = environment_of(folder, **more)
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


def test_an_error_of_the_kernel_itself_is_no_fault_of_the_cache(tmp_path: Path) -> None:
    answer, log = run(tmp_path, RAISING)
    assert answer.splitlines() == ["2.0", "the kernel's own", "the kernel's own", "3.0 False"]
    assert "cannot be used" not in log


@pytest.mark.skipif(os.name != "posix", reason="there are no locks on files elsewhere")
def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SLOW)
    command, environment = [sys.executable, str(tmp_path / "program.py")], environment_of(tmp_path)
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    answers = [process.communicate(timeout=120)[0].strip() for process in started]
    assert sorted(answers) == ["[0.0, 2.0, 4.0] disk", "[0.0, 2.0, 4.0] fresh"]


@pytest.mark.parametrize(
    ("way", "duration"), [({"FLOWPOOL_CHECKED": "1"}, "some minutes"), ({"FLOWPOOL_PLAIN": "1"}, "a minute")]
)
def test_how_long_compiling_takes_depends_on_how_it_is_done(way: dict[str, str], duration: str, tmp_path: Path) -> None:
    _, log = run(tmp_path, **way)
    assert f"takes up to {duration}, once" in log
