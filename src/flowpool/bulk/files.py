"""Files that appear at once and complete, or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

TEMPORARY = ".part-"  # how the names of unfinished files begin; a killed process may leave one, and readers ignore it


def write_atomically(path: Path, content: bytes) -> None:
    """Puts ``content`` into ``path``; after a crash, the file is the old one or the new one."""
    fill_atomically(path, lambda part: _write(part, content))


def fill_atomically(path: Path, fill: Callable[[Path], None]) -> None:
    """Lets ``fill`` write a file beside ``path``, makes it durable, and gives it that name."""
    # In the same folder, because os.replace cannot cross file systems; a random name, because two may write at once.
    part = path.parent / f"{TEMPORARY}{secrets.token_hex(8)}{path.suffix}"
    try:
        fill(part)
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)


def _sync_folder(folder: Path) -> None:
    """Makes the new name survive a power cut, where folders can be opened at all."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
