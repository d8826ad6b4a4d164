"""Crafted archives are refused, and nothing is ever written (contract: dataset archives)."""

import random
import stat
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from flowpool.lab.datasets.archive import (
    MAX_ARCHIVE_BYTES,
    MAX_MEMBERS,
    MAX_TOTAL_BYTES,
    read_archive,
    read_folder,
)
from flowpool.lab.datasets.errors import ArchiveError

GOOD = {"SET/SET_A.txt": b"1, 2\n2, 1\n", "SET/SET_graph_labels.txt": b"1\n", "SET/README.txt": b"hello"}
WANTED = ("SET_A.txt", "SET_graph_labels.txt", "SET_node_labels.txt")


def write(path: Path, extra: dict[str | zipfile.ZipInfo, bytes]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of duplicate names when it writes them
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in [*GOOD.items(), *extra.items()]:
                archive.writestr(name, data)
    return path


def member(name: str, kind: int = stat.S_IFREG) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.filename = name  # the constructor would cut the name at a NUL
    info.external_attr = (kind | 0o777) << 16
    return info


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_only_the_expected_members_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "SET.zip", {"OTHER/SET_node_labels.txt": b"1\n"})
    expected = {name.removeprefix("SET/"): GOOD[name] for name in ("SET/SET_A.txt", "SET/SET_graph_labels.txt")}
    assert read_archive(path, "SET", WANTED) == expected


@pytest.mark.parametrize("prefix", ["SET//", "SET///", "./SET/", ".//SET/./"])
def test_separators_that_mean_nothing_do_no_harm(tmp_path: Path, prefix: str) -> None:
    """Archives of 2016 in the TU collection name their members NAME//NAME_A.txt."""
    path = tmp_path / "SET.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member("SET/", stat.S_IFDIR), b"")
        for name in ("SET_A.txt", "SET_graph_labels.txt"):
            archive.writestr(prefix + name, GOOD[f"SET/{name}"])
    expected = {name: GOOD[f"SET/{name}"] for name in ("SET_A.txt", "SET_graph_labels.txt")}
    assert read_archive(path, "SET", WANTED) == expected


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"SET//SET_A.txt": b"1, 1\n"}, "same name"),
        ({"SET//..//..//x": b"x"}, "points outside"),
        ({"//tmp/x": b"x"}, "absolute path"),
        ({"../x": b"x"}, "points outside"),
        ({"SET/../../x": b"x"}, "points outside"),
        ({"/tmp/x": b"x"}, "absolute path"),  # noqa: S108
        ({member("C:\\x"): b"x"}, "backslash or colon"),
        ({member("SET\\..\\..\\x"): b"x"}, "backslash or colon"),
        ({member("SET/SET_A.txt\0.exe"): b"x"}, "NUL"),
        ({member("SET/link", stat.S_IFLNK): b"/etc/passwd"}, "link or a device"),
        ({member("SET/pipe", stat.S_IFIFO): b""}, "link or a device"),
        ({member("SET/SET_A.txt"): b"1, 1\n"}, "same name"),
        ({"set/SET_a.TXT": b"1, 1\n"}, "upper and lower case"),
        ({"SET/e\u0301": b"", "SET/\u00e9": b""}, "same name"),
        ({f"SET/{number}": b"" for number in range(MAX_MEMBERS)}, "at most 64"),
        ({"SET/zeros": bytes(2 * 10**7)}, "-fold when unpacked"),
    ],
)
def test_crafted_archives_are_refused_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: dict[str | zipfile.ZipInfo, bytes], message: str
) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    path = write(inner / "SET.zip", extra)
    before = tree(tmp_path)
    with pytest.raises(ArchiveError, match=message):
        read_archive(path, "SET", WANTED)
    assert tree(tmp_path) == before


def patched(path: Path, change: Callable[[bytearray, int], None]) -> Path:
    """The archive with ``change(bytes, place)`` made to the first entry of its central directory."""
    data = bytearray(path.read_bytes())
    change(data, data.index(b"PK\x01\x02"))
    path.write_bytes(data)
    return path


def set_size(size: int) -> Callable[[bytearray, int], None]:
    def change(data: bytearray, place: int) -> None:
        data[place + 24 : place + 28] = size.to_bytes(4, "little")

    return change


def test_a_bomb_that_admits_its_size_is_refused(tmp_path: Path) -> None:
    path = patched(write(tmp_path / "SET.zip", {}), set_size(MAX_TOTAL_BYTES + 1))
    with pytest.raises(ArchiveError, match="would unpack to"):
        read_archive(path, "SET", WANTED)


def test_a_bomb_that_hides_its_size_is_refused_before_it_inflates(tmp_path: Path) -> None:
    path = tmp_path / "SET.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("SET/SET_A.txt", bytes(10**8))
    patched(path, set_size(10))
    tracemalloc.start()
    with pytest.raises(ArchiveError, match="damaged"):
        read_archive(path, "SET", WANTED)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**7


def test_encrypted_and_exotic_members_are_refused(tmp_path: Path) -> None:
    def encrypt(data: bytearray, place: int) -> None:
        data[place + 8] |= 1

    with pytest.raises(ArchiveError, match="encrypted"):
        read_archive(patched(write(tmp_path / "SET.zip", {}), encrypt), "SET", WANTED)
    with zipfile.ZipFile(tmp_path / "SET.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("SET/SET_A.txt", b"1, 2\n")
    with pytest.raises(ArchiveError, match="compression method 14"):
        read_archive(tmp_path / "SET.zip", "SET", WANTED)


def test_damaged_archives_are_refused_whichever_byte_it_is(tmp_path: Path) -> None:
    whole = write(tmp_path / "SET.zip", {}).read_bytes()
    expected = read_archive(tmp_path / "SET.zip", "SET", WANTED)
    path = tmp_path / "damaged.zip"
    randomness = random.Random(0)  # noqa: S311
    refused = 0
    cases = [whole[: len(whole) * tenth // 10] for tenth in range(10)]
    for _ in range(1000):
        damaged = bytearray(whole)
        for _ in range(randomness.randint(1, 4)):
            damaged[randomness.randrange(len(damaged))] = randomness.randrange(256)
        cases.append(bytes(damaged))
    for case in cases:
        path.write_bytes(case)
        try:
            found = read_archive(path, "SET", WANTED)
        except ArchiveError:
            refused += 1
        else:
            # A damaged name is another name; a damaged text would have failed its checksum.
            assert found.items() <= expected.items()
    assert refused > 500


def test_a_huge_archive_is_not_even_opened(tmp_path: Path) -> None:
    with (tmp_path / "SET.zip").open("wb") as file:
        file.truncate(MAX_ARCHIVE_BYTES + 1)  # sparse: takes no room
    with pytest.raises(ArchiveError, match="archives up to"):
        read_archive(tmp_path / "SET.zip", "SET", WANTED)


def test_a_folder_gives_regular_files_only(tmp_path: Path) -> None:
    (tmp_path / "SET_A.txt").write_bytes(b"1, 2\n")
    (tmp_path / "SET_node_labels.txt").mkdir()
    (tmp_path / "README.txt").write_bytes(b"hello")
    assert read_folder(tmp_path, WANTED) == {"SET_A.txt": b"1, 2\n"}


def test_a_folder_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "SET_A.txt").open("wb") as file:
        file.truncate(MAX_TOTAL_BYTES + 1)  # sparse: takes no room
    with pytest.raises(ArchiveError, match="bytes"):
        read_folder(tmp_path, WANTED)
