"""How quickly ``flowpool pool`` goes through a large table, in how much memory, and what ``kill -9`` does to it.

Graphs like molecules: 18 nodes on average, 8 features, pooled to 5 points. The table is pooled in one process and on Ray. A
smaller one is then pooled again and again, with the driver or a worker of Ray killed at several moments and the same command
given once more; the tables must be the same to the bit.

    python benchmarks/bulk.py --graphs 1000000 --killed 200000 --folder /tmp/bulk

Memory and CPU time are those of all processes that a run started, memory at its highest sum of unshared pages.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as parquet

WIDTH, NODES, POINTS = 8, 18, 5
AT_ONCE = 50_000
MOMENTS = (0.1, 0.3, 0.5, 0.7, 0.9)  # shares of the parts that are there


def make(path: Path, count: int) -> None:
    """A table of graphs in one file, the same every time."""
    random = np.random.default_rng(0)
    kinds = random.standard_normal((12, WIDTH)).astype(np.float32)  # atoms
    kind = pa.list_(pa.list_(pa.float32(), WIDTH))
    schema = pa.schema({"id": pa.int64(), "x": kind})
    with parquet.ParquetWriter(path, schema) as file:
        for first in range(0, count, AT_ONCE):
            sizes = random.integers(NODES - 8, NODES + 9, min(AT_ONCE, count - first))
            nodes = kinds[random.integers(len(kinds), size=sizes.sum())]
            nodes = nodes + 0.3 * random.standard_normal(nodes.shape, dtype=np.float32)  # neighbours
            vectors = pa.FixedSizeListArray.from_arrays(nodes.ravel(), WIDTH)
            offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
            rows = pa.ListArray.from_arrays(offsets, vectors).cast(kind)
            file.write_table(pa.table({"id": np.arange(first, first + len(sizes)), "x": rows}, schema))


class Used(NamedTuple):
    """What a run took."""

    seconds: float
    cpu: float
    memory: float  # GB
    code: int


def command(source: Path, target: Path, ray: bool) -> subprocess.Popen[bytes]:
    """The command as a process, with two cores."""
    arguments = [sys.executable, "-m", "flowpool", "pool", str(source), str(target), "--points", str(POINTS)]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    return subprocess.Popen(  # noqa: S603
        [*arguments, *(["--on", "ray"] if ray else [])], env=environment, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def processes(driver: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The driver and all that it started."""
    try:
        own = psutil.Process(driver.pid)
        return [own, *own.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def watch(driver: subprocess.Popen[bytes]) -> Used:
    """Waits for a run, looking at it once a second."""
    begun, cpu, memory = time.perf_counter(), dict[int, float](), 0.0
    while driver.poll() is None:
        total = 0.0
        for process in processes(driver):
            try:
                times = process.cpu_times()
                cpu[process.pid] = times.user + times.system
                total += process.memory_full_info().uss / 1e9
            except psutil.Error:
                continue
        memory = max(memory, total)
        time.sleep(1)
    return Used(time.perf_counter() - begun, sum(cpu.values()), memory, driver.returncode)


def digest(folder: Path) -> str:
    """Of all parts, with their names."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("part-*.parquet")):
        found.update(path.name.encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def is_whole(folder: Path, count: int) -> bool:
    """Whether every graph is there, once."""
    ids = parquet.read_table(folder, columns=["id"])["id"].to_numpy()
    return bool(np.array_equal(np.sort(ids), np.arange(count)))


def speed(source: Path, folder: Path, count: int, ray: bool) -> None:
    """Prints what one run over the table took."""
    target = folder / ("ray" if ray else "local")
    used = watch(command(source, target, ray))
    name = "Ray, 2 workers" if ray else "one process"
    print(
        f"{name}: {count} graphs in {used.seconds:.0f} s ({count / used.seconds:.0f}/s), {used.cpu:.0f} s of CPU "
        f"({2 * count / used.cpu:.0f}/s on two free cores), {used.memory:.2f} GB, exit code {used.code}, "
        f"{'whole' if is_whole(target, count) else 'NOT WHOLE'}, {digest(target)}",
        flush=True,
    )


def kill(source: Path, folder: Path, count: int, parts: int, expected: str, moment: float, victim: str) -> None:
    """Kills the driver or a worker when a share of the parts is there, gives the command again, and prints what came of it."""
    ray = victim != "driver"
    target = folder / f"{victim.replace(' ', '-')}-{100 * moment:.0f}"  # a dot would be the ending of a file
    driver = command(source, target, ray)
    while driver.poll() is None and len(list(target.glob("part-*.parquet"))) < moment * parts:
        time.sleep(0.02)
    started = processes(driver)
    workers = [process for process in started if "MapWorker" in " ".join(_line(process))]
    there = len(list(target.glob("part-*.parquet")))
    victims = (workers if victim == "worker of Ray" else started)[:1]
    for process in victims:
        process.send_signal(signal.SIGKILL)
    code = driver.wait()
    if victim != "worker of Ray":  # what the driver of a cluster on this machine leaves behind ends by itself
        psutil.wait_procs(started, timeout=60)
        code = command(source, target, ray).wait()
    same = digest(target) == expected and is_whole(target, count)
    verdict = "the same bits, every graph once" if same else "ANOTHER TABLE"
    print(f"{len(victims)} {victim} killed at {there} of {parts} parts: then exit code {code}, {verdict}", flush=True)


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=1_000_000)
    parser.add_argument("--killed", type=int, default=200_000, help="graphs of the table whose runs are killed")
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    source = chosen.folder / "graphs.parquet"
    make(source, chosen.graphs)
    print(f"{source.stat().st_size / 1e6:.0f} MB in {source}", flush=True)
    for ray in (False, True):
        speed(source, chosen.folder, chosen.graphs, ray)
    make(source, chosen.killed)
    whole = chosen.folder / "whole"
    command(source, whole, ray=False).wait()
    parts, expected = len(list(whole.glob("part-*.parquet"))), digest(whole)
    for victim in ("driver", "worker of Ray", "driver of Ray"):
        for moment in MOMENTS:
            kill(source, chosen.folder, chosen.killed, parts, expected, moment, victim)


if __name__ == "__main__":
    main()
