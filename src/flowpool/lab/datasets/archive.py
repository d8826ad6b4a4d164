"""Bytes of the expected files of a dataset, from a zip archive or a folder.

Nothing is ever unpacked to disk: the few expected members are read into memory, so an archive has no
way to write anywhere. It is still judged as a whole first. An archive with one dangerous member was
made by somebody whose other members deserve no trust either.
"""

from __future__ import annotations

import stat
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from flowpool.lab.datasets.errors import ArchiveError

# The eight known archives have at most 5 members, 4.7 MB, 25 MB unpacked and a ratio of 10.
MAX_ARCHIVE_BYTES = 64 * 2**20
MAX_MEMBERS = 64
MAX_TOTAL_BYTES = 512 * 2**20
MAX_RATIO = 100  # deflate cannot exceed 1032; text of numbers stays below 20

_ENCRYPTED = 0x1
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# What the zip reader raises depends on which byte is damaged.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    OverflowError,
    OSError,
    ValueError,
)


def read_archive(path: Path, folder: str, wanted: Collection[str]) -> dict[str, bytes]:
    """Contents of those ``wanted`` files that the zip archive holds under ``folder/``.

    Raises:
        ArchiveError: the archive is damaged, or any of its members (wanted or not) is unsafe.
    """
    size = path.stat().st_size
    if size > MAX_ARCHIVE_BYTES:
        raise ArchiveError(
            f"{path} has {size:,} bytes; archives up to {MAX_ARCHIVE_BYTES:,} are read. "
            "If you trust it, unpack it and give the folder."
        )
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                _check_members(path, size, members)
                present = {_plain(member.filename): member for member in members}
                found = [name for name in wanted if f"{folder}/{name}" in present]
                return {name: _read_member(archive, present[f"{folder}/{name}"]) for name in found}
        except ArchiveError:
            raise
        except _DAMAGE as error:
            raise ArchiveError(f"{path} is damaged or no zip archive ({error}); get it again.") from error


def read_folder(path: Path, wanted: Collection[str]) -> dict[str, bytes]:
    """Contents of those ``wanted`` files that stand in the folder ``path``."""
    present = [path / file for file in wanted if (path / file).is_file()]
    total = sum(file.stat().st_size for file in present)
    if total > MAX_TOTAL_BYTES:
        raise ArchiveError(f"The files of {path} have {total:,} bytes; up to {MAX_TOTAL_BYTES:,} are read.")
    return {file.name: file.read_bytes() for file in present}


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    with archive.open(member) as file:
        # With a size, the reader stops there even if the member inflates to more than it says, and the
        # checksum then fails. Without one it would inflate everything first.
        return file.read(member.file_size + 1)


def _check_members(path: Path, archive_size: int, members: list[zipfile.ZipInfo]) -> None:
    if len(members) > MAX_MEMBERS:
        raise ArchiveError(f"{path} has {len(members):,} members; at most {MAX_MEMBERS} are allowed.")
    total = sum(member.file_size for member in members)
    if total > MAX_TOTAL_BYTES:
        raise ArchiveError(f"{path} would unpack to {total:,} bytes; up to {MAX_TOTAL_BYTES:,} are read.")
    # The archive's own size is the one number here that its author cannot make up.
    if total > MAX_RATIO * archive_size:
        raise ArchiveError(
            f"{path} would grow {total / archive_size:.0f}-fold when unpacked; {MAX_RATIO} is the limit."
        )
    seen: dict[str, str] = {}
    for member in members:
        problem = _problem_of(member)
        if problem:
            raise ArchiveError(f"{path} is refused: member {member.orig_filename!r} {problem}.")
        # File systems of Windows and macOS take these names for the same file.
        folded = unicodedata.normalize("NFC", _plain(member.filename)).casefold()
        if folded in seen:
            raise ArchiveError(
                f"{path} is refused: members {seen[folded]!r} and {member.filename!r} have the same name "
                "or differ in upper and lower case alone."
            )
        seen[folded] = member.filename


def _plain(name: str) -> str:
    """The name without what means nothing in it: ``NAME//NAME_A.txt``, ``./NAME/NAME_A.txt``, ``NAME/``."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _problem_of(member: zipfile.ZipInfo) -> str | None:
    name = member.orig_filename
    if "\0" in name or "\\" in name or ":" in name:
        return "has a name with a NUL, backslash or colon"
    if PurePosixPath(name).is_absolute():
        return "has an absolute path"
    if ".." in PurePosixPath(name).parts or not PurePosixPath(name).parts:
        return "points outside of its folder"
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is a link or a device, not a file"
    if member.flag_bits & _ENCRYPTED:
        return "is encrypted"
    if member.compress_type not in _METHODS:
        return f"uses compression method {member.compress_type}; only stored and deflated are read"
    return None
