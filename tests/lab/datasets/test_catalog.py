"""Where datasets are found, in which order, and what their checksums say."""

import importlib.util
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flowpool.lab.datasets import BAGS, catalog, download
from flowpool.lab.datasets.catalog import KNOWN, find_dataset, list_datasets, load_dataset
from flowpool.lab.datasets.errors import ChecksumError, DatasetNotFoundError
from flowpool.lab.datasets.molecules import MOLECULES

DATA = Path(os.environ.get("FLOWPOOL_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data")
GRAKEL = importlib.util.find_spec("grakel")
MUTAG = Path(GRAKEL.submodule_search_locations[0]) / "tests" / "data" / "MUTAG"  # type: ignore


def mutag_files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(MUTAG.glob("MUTAG_*.txt"))}


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(f"MUTAG/{name}", data)
    return buffer.getvalue()


def respelt(files: dict[str, bytes]) -> dict[str, bytes]:
    """The same graphs: edges in reverse order, without blanks, Windows line ends."""
    edges = files["MUTAG_A.txt"].replace(b" ", b"").split()[::-1]
    return {name: data.replace(b"\n", b"\r\n") for name, data in files.items()} | {"MUTAG_A.txt": b"\r\n".join(edges)}


def tampered(files: dict[str, bytes]) -> dict[str, bytes]:
    """One class label changed."""
    labels = files["MUTAG_graph_labels.txt"].split()
    labels[100] = b"1" if labels[100] == b"-1" else b"-1"
    return files | {"MUTAG_graph_labels.txt": b"\n".join(labels)}


@pytest.fixture(autouse=True)
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data folder, an empty cache, no network."""
    monkeypatch.delenv("FLOWPOOL_DATA", raising=False)
    monkeypatch.setattr(catalog, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(download, "open_https", lambda url: pytest.fail(f"the network was asked for {url}"))


@pytest.fixture
def without_grakel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_grakel_mutag", lambda: None)


def serve(monkeypatch: pytest.MonkeyPatch, body: bytes) -> list[str]:
    asked: list[str] = []

    def open_url(url: str) -> io.BytesIO:
        asked.append(url)
        return io.BytesIO(body)

    monkeypatch.setattr(download, "open_https", open_url)
    return asked


@pytest.mark.parametrize("place", ["MUTAG.zip", "tu/MUTAG.zip", "MUTAG", "tu/MUTAG", "."])
@pytest.mark.parametrize("by_variable", [False, True])
def test_the_data_folder_comes_first(
    place: str, by_variable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data" / place
    if place.endswith(".zip"):
        path.parent.mkdir(parents=True)
        path.write_bytes(packed(tampered(mutag_files())))
    else:
        path.mkdir(parents=True)
        for name, data in tampered(mutag_files()).items():
            (path / name).write_bytes(data)
    folder = tmp_path / "data"
    if by_variable:
        monkeypatch.setenv("FLOWPOOL_DATA", str(folder))
    found = find_dataset("MUTAG", None if by_variable else folder)
    assert found is not None and found.source == "data folder" and found.path.samefile(path)
    dataset = load_dataset("MUTAG", None if by_variable else folder)
    difference = (dataset.labels != load_dataset("MUTAG", MUTAG).labels).nonzero()
    assert difference.tolist() == [[100]]  # this copy, not grakel's
    if place.endswith(".zip"):
        assert find_dataset("MUTAG", path) == ("data folder", path)  # the archive itself


def test_an_explicit_folder_wins_over_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "MUTAG.zip").write_bytes(b"")
    monkeypatch.setenv("FLOWPOOL_DATA", str(tmp_path / "one"))
    assert find_dataset("MUTAG", tmp_path / "two") == ("data folder", tmp_path / "two" / "MUTAG.zip")


def test_mutag_comes_with_grakel_otherwise(tmp_path: Path) -> None:
    assert find_dataset("MUTAG") == ("grakel", MUTAG)
    assert find_dataset("MUTAG", tmp_path) == ("grakel", MUTAG)
    assert len(load_dataset("MUTAG")) == 188


def test_finding_mutag_does_not_import_grakel() -> None:
    code = (
        "import sys; from flowpool.lab.datasets.catalog import find_dataset; "
        "assert find_dataset('MUTAG').source == 'grakel'; assert 'grakel' not in sys.modules"
    )
    environment = {name: value for name, value in os.environ.items() if name != "FLOWPOOL_DATA"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)  # noqa: S603


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DatasetNotFoundError, match="nowhere, given as data"):
        find_dataset("MUTAG", tmp_path / "nowhere")
    monkeypatch.setenv("FLOWPOOL_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DatasetNotFoundError, match="nowhere, given as FLOWPOOL_DATA"):
        load_dataset("MUTAG")


@pytest.mark.parametrize("name", ["../MUTAG", "/etc/passwd", "a/b", "a\\b", "", ".", "..", "a..b", "MUTAG\0", "C:x"])
def test_names_that_are_paths_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a dataset name"):
        find_dataset(name, tmp_path)


def test_an_absent_dataset_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        DatasetNotFoundError, match="'MUTANT' was not found; it is none of the known .*MUTAG.*MUTANT.zip"
    ):
        load_dataset("MUTANT", tmp_path)
    with pytest.raises(DatasetNotFoundError, match="it is a known dataset"):
        load_dataset("DD", tmp_path, download=False)


@pytest.mark.usefixtures("without_grakel")
@pytest.mark.parametrize("spelling", [dict, respelt])
def test_a_download_with_the_known_graphs_is_kept_and_used_again(
    spelling: Callable[[dict[str, bytes]], dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = serve(monkeypatch, packed(spelling(mutag_files())))
    first = load_dataset("MUTAG")
    second = load_dataset("MUTAG")
    assert asked == ["https://www.chrsmrrs.com/graphkerneldatasets/MUTAG.zip"]
    assert torch.equal(first.edge_index, second.edge_index)
    assert torch.equal(first.edge_index, load_dataset("MUTAG", MUTAG).edge_index)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["MUTAG.zip"]


@pytest.mark.usefixtures("without_grakel")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (packed(tampered(mutag_files())), f"instead of {KNOWN['MUTAG'].content}"),
        (packed(mutag_files())[:-100], "damaged"),
        (packed(mutag_files())[: 2**12], "damaged"),
        (packed(mutag_files() | {"../../x": b"x"}), "points outside"),
        (packed(mutag_files() | {"MUTAG_A.txt": b"1, 2\n2, x\n"}), "MUTAG_A.txt, line 2"),
        (b"<html>Not found</html>", "no zip archive"),
        (b"", "no zip archive"),
    ],
)
def test_any_other_download_is_refused(
    body: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, body)
    with pytest.raises(ChecksumError, match=message):
        load_dataset("MUTAG")
    assert list((tmp_path / "cache").iterdir()) == []
    assert find_dataset("MUTAG") is None


@pytest.mark.usefixtures("without_grakel")
def test_a_cached_file_that_has_changed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "MUTAG.zip").write_bytes(packed(tampered(mutag_files())))
    with pytest.raises(ChecksumError, match="has changed since it was downloaded"):
        load_dataset("MUTAG")


def test_the_list_tells_what_is_here_and_whether_it_is_known(tmp_path: Path) -> None:
    (tmp_path / "MUTAG.zip").write_bytes(packed(respelt(mutag_files())))
    (tmp_path / "DD.zip").write_bytes(b"rubbish")
    (tmp_path / "NCI1").mkdir()
    for name, data in mutag_files().items():
        (tmp_path / "NCI1" / name.replace("MUTAG", "NCI1")).write_bytes(data)
    entries = {entry.name: entry for entry in list_datasets(tmp_path)}
    assert list(entries) == [*KNOWN, *MOLECULES, "DIGITS", *BAGS]
    assert entries["DIGITS"].found.source == "scikit-learn" and entries["DIGITS"].matches
    assert entries["MUTAG"].found == ("data folder", tmp_path / "MUTAG.zip")
    assert (entries["MUTAG"].matches, entries["MUTAG"].note) == (True, "the published graphs, packed differently")
    assert (entries["DD"].matches, entries["DD"].note[:10]) == (False, "unreadable")
    assert (entries["NCI1"].matches, entries["NCI1"].sha256) == (False, KNOWN["MUTAG"].content)
    assert (entries["ENZYMES"].found, entries["ENZYMES"].sha256, entries["ENZYMES"].matches) == (
        None,
        None,
        None,
    )
    grakel = {entry.name: entry for entry in list_datasets()}["MUTAG"]
    assert (grakel.found, grakel.matches, grakel.sha256) == (("grakel", MUTAG), True, KNOWN["MUTAG"].content)


HERE = [name for name in KNOWN if (DATA / "tu" / f"{name}.zip").is_file()]


def test_archives_beside_the_project_are_the_known_ones() -> None:
    # Over whatever is present; read_content is what turns an archive into the second checksum.
    for name in HERE:
        path = DATA / "tu" / f"{name}.zip"
        assert catalog._file_sha256(path) == KNOWN[name].archive
        assert catalog.read_content(path, name).sha256() == KNOWN[name].content
