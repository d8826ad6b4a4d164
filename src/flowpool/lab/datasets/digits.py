"""DIGITS: the handwritten digits that come with scikit-learn, as weighted clouds in the plane.

An image of 8 x 8 pixels is the set of its inked pixels: their places, and as masses how much ink is on each.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch

from flowpool.lab.datasets.record import GraphDataset, cloud_dataset

SIDE = 8  # pixels
SHA256 = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"  # of scikit-learn's file


def make_digits() -> GraphDataset:
    """1,797 clouds of 16 to 42 places (x to the right, y upwards, in pixels), with masses and without edges."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    ink = images.reshape(-1, SIDE, SIDE)
    image, row, column = np.nonzero(ink)
    places = np.stack([column, SIDE - 1 - row], axis=1)
    masses = torch.from_numpy(ink[image, row, column].astype(np.float32))
    digits = tuple(str(digit) for digit in range(10))
    classes = torch.from_numpy(labels.astype(np.int64))
    return cloud_dataset("DIGITS", places, np.bincount(image), classes, digits, masses=masses)


def digits_file() -> Path | None:
    """Where scikit-learn keeps the images, or None without scikit-learn; imports nothing."""
    spec = importlib.util.find_spec("sklearn")
    for place in (spec.submodule_search_locations or []) if spec else []:
        file = Path(place) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            return file
    return None
