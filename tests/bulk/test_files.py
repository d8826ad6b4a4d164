"""Files that are whole, whatever happens while they are written."""

import errno
import os
from pathlib import Path

import pytest

from flowpool.bulk import files
from flowpool.bulk.files import fill_atomically, write_atomically


def test_content_arrives_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content in (b"one", b"two"):
        write_atomically(path, content)
        assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("step", ["_write", "fsync", "replace"])
def test_a_full_disk_at_any_step_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")
    monkeypatch.setattr(files if step == "_write" else os, step, full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_half_written_file_never_has_the_name(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"

    def fill(part: Path) -> None:
        part.write_bytes(b"half")
        assert not path.exists()
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fill_atomically(path, fill)
    assert list(tmp_path.iterdir()) == []


def test_file_and_folder_are_made_durable_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(handle: int) -> None:
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file")
        fsync(handle)

    def note_replace(one: Path, two: Path) -> None:
        events.append("replace")
        assert one.parent == two.parent
        replace(one, two)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_atomically(tmp_path / "a", b"x")
    assert events == ["file", "replace", "folder"]
