"""ESOL, Lipophilicity and BACE with the five splits that Chen et al. published with OT-GNN (2020)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flowpool.lab.datasets.download import cache_folder, fetch
from flowpool.lab.datasets.errors import ChecksumError, DatasetFormatError
from flowpool.lab.datasets.record import Fold, GraphDataset
from flowpool.lab.datasets.tables import read_molecules

REPOSITORY = "https://raw.githubusercontent.com/benatorc/OTGNN/9282a8627ff3b28d40b538d75217cd87b4a45341/data"
_MOST_BYTES = 2**20


class Molecules(NamedTuple):
    """The folder of a dataset in the repository, what is predicted, and the SHA-256 of its files."""

    folder: str
    about: str
    table: str
    splits: tuple[str, str, str, str, str]

    @property
    def files(self) -> dict[str, str]:
        """SHA-256 by the name of the file."""
        return {"raw.csv": self.table, **{f"split_{k}.json": digest for k, digest in enumerate(self.splits)}}


MOLECULES = {
    "ESOL": Molecules(
        "sol",
        "1,128 molecules, logarithm of solubility",
        "e1e3c2eefdfe64130216c973dbc484db69eb7f97f9503f7219b659cdb218cec1",
        (
            "6de848b3cb75a3be555f9ed956fa42c273ca15eb7a3227c2fbcdde4aa1767c22",
            "8dc86e18e42c99b2eee6690fe6f275be11c8177c536d956a753f691deeff0098",
            "fab2c297ab40907d3475f7c7f015cf1160937c30cb2c309f3b008f9209cedc43",
            "5fbcbfc4386598902b4884ac4e2f50c379ee5de58ed47eeab954e14849576dbd",
            "7d9ee998f12baa18f2a994a8fd206838d96022e61c36b84b92387795b6664f39",
        ),
    ),
    "Lipophilicity": Molecules(
        "lipo",
        "4,200 molecules, logD between octanol and water",
        "fddbbbc8eb462c0f8b9bb83a1e6516012c2d11e4304132eff3dcb93ea0078ffc",
        (
            "3a8dcad95943f3031a4e891b8f35375d8a47445d311cf391ba739fe3ac8a02bd",
            "fe2df41fd941344af819caa1e2367b179665471f31ba3a92a004e911553b27c7",
            "29b6e48d20a01546dd37c63a022ed2e4df7624da5f94a8a9eeea0c92d7909b83",
            "3393603aa3d1c1e7988dc28397db686bdf3c2256da732be6644c53ee0fe20d35",
            "7caeeb9420ad4303e3ef5236a20d170de1d86ec2f255157bc10e94a989af8640",
        ),
    ),
    "BACE": Molecules(
        "bace",
        "1,513 molecules, whether they bind to an enzyme",
        "91f7766d54171ffbc90e82621292a6095d0a1f0b39d230ff0e4cb278c2782df7",
        (
            "98777d52c18f9bea14cf034f2124348cd2bacc03fccc3b39f7f6a8eb7f90947b",
            "59d1fa7c6ed32dfe7a926d0a2a6753c11f77db5b66672b22b066a034883f0ab1",
            "c5d4cba9fb90666fb1fc279e2f2263bfc5730902bc9700ceeae801cc5454c6ac",
            "8f1731a1536ecdbd90413df0fa9626d34e0cce4f03609d8dd2036dcd33b05f26",
            "9ff1154113f8968258646c221927120a49277b38774b2974a41c77fb7221c81d",
        ),
    ),
}


def molecules_folder(name: str, data: Path | None) -> Path | None:
    """The folder of a dataset in the data folder or beside it, else in the cache, or None."""
    places = [] if data is None else [data, data.resolve().parent]
    candidates = [place / kind / name for place in places for kind in ("", "molecules")]
    found = (place for place in [*candidates, cache_folder() / name] if (place / "raw.csv").is_file())
    return next(found, None)


def download_molecules(name: str) -> Path:
    """The folder of a dataset in the user's cache, every file checked."""
    known, folder = MOLECULES[name], cache_folder() / name
    for file, digest in known.files.items():

        def check(path: Path, digest: str = digest, file: str = file) -> None:
            if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != digest:
                raise ChecksumError(f"{REPOSITORY}/{known.folder}/{file} has SHA-256 {found} instead of {digest}.")

        if not (folder / file).is_file():
            fetch(f"{REPOSITORY}/{known.folder}/{file}", folder / file, check, max_bytes=_MOST_BYTES)
    return folder


def load_molecules(name: str, folder: Path) -> GraphDataset:
    """The dataset in a folder with ``raw.csv`` (SMILES and target, no header) and its splits."""
    for file, digest in MOLECULES[name].files.items():
        if hashlib.sha256((folder / file).read_bytes()).hexdigest() != digest:
            raise ChecksumError(f"{folder / file} is not the known one of {name}; delete it, or fetch it again.")
    dataset = read_molecules(folder / "raw.csv", "1", ["2"], name=name)
    if dataset.notes:  # else numbers of rows would not be numbers of graphs
        raise DatasetFormatError("raw.csv", 1, f"RDKit cannot read all of {name}. {dataset.notes[0]}")
    return replace(dataset, folds=tuple(_fold(folder / f"split_{number}.json") for number in range(5)))


def _fold(path: Path) -> Fold:
    parts = json.loads(path.read_text())
    return Fold(*(np.sort(np.array(parts[part], dtype=np.int64)) for part in ("train", "val", "test")))
