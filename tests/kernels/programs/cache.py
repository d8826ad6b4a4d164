"""A kernel whose cached files are damaged in one way after the other; prints what became of each call.

For each: the way of damage, whether the answer was right, whether the kernel came from the disk, and what was said.
"""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from flowpool.kernels.machine import jit

SAID: list[str] = []


class Keep(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        SAID.append(record.getMessage())


def twice(values):  # type: ignore[no-untyped-def]
    total = 0.0
    for value in values:
        total += 2.0 * value
    return total


def report(name: str, damage: Callable[[Path], None] | None = None, ending: str = "") -> None:
    files = [path for path in jit._FOLDER.rglob("*.nb?") if path.name.endswith(ending)] if jit._FOLDER else []
    if damage is not None:
        assert files, "nothing to damage"
        for path in files:
            damage(path)
    SAID.clear()
    jit._announced = False
    kernel = jit.entry(twice)
    right = kernel(np.arange(4.0)) == 12.0 and kernel(np.arange(3.0)) == 6.0
    hits = sum(kernel._dispatcher.stats.cache_hits.values())
    said = "compiling" if any("Compiling" in text for text in SAID) else "-"
    print(name, "right" if right else "wrong", "disk" if hits else "fresh", said, len(SAID), flush=True)


def garble(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for place in range(len(content) // 3, len(content), 7):
        content[place] ^= 0x5A
    path.write_bytes(content)


def garble_and_vouch(path: Path) -> None:
    garble(path)
    jit._seal(path).write_text(jit._digest(path))


def main() -> None:
    logging.getLogger("flowpool").addHandler(Keep())
    if sys.argv[1:] == ["full"]:
        import numba.core.caching as caching

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        caching.IndexDataCacheFile.save = full
        report("full")
        return
    if sys.argv[1:] == ["nowhere"]:
        assert jit._FOLDER is None
        report("nowhere")
        return
    report("first")
    report("again")
    for ending in ("nbi", "nbc"):
        for name, damage in (
            ("truncated", lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])),
            ("garbled", garble),
            ("emptied", lambda path: path.write_bytes(b"")),
            ("removed", lambda path: path.unlink()),
            ("unsealed", lambda path: jit._seal(path).unlink()),
        ):
            report(f"{name}.{ending}", damage, ending)
            report("mended")
    report("vouched.nbi", garble_and_vouch, "nbi")


if __name__ == "__main__":
    main()
