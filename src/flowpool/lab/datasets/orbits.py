r"""ORBIT5K: orbits of a map of the unit square, which has another shape for each value of its parameter.

.. math:: x \leftarrow x + r\,y\,(1 - y) \bmod 1, \qquad y \leftarrow y + r\,x\,(1 - x) \bmod 1

1,000 orbits of 1,000 points for each of five values of r, from random first points; made by formula, so that nothing has
to be downloaded. Five draws of 70 % for training and 30 % for the test are usual; a tenth of the former validates.
"""

from __future__ import annotations

import numpy as np
import torch

from flowpool.lab.datasets.record import Fold, GraphDataset, cloud_dataset

PARAMETERS = (2.5, 3.5, 4.0, 4.1, 4.3)
_NUM_DRAWS = 5
_TEST_SHARE = 0.3
_VALIDATION_SHARE = 0.1


def make_orbits(num_per_class: int = 1000, num_points: int = 1000, seed: int = 0) -> GraphDataset:
    """The dataset with its five draws; graph g has parameter g mod 5."""
    x, y = np.random.default_rng(seed).uniform(size=(2, num_per_class * len(PARAMETERS)))
    r = np.tile(PARAMETERS, num_per_class)
    orbit = np.empty((len(r), num_points, 2))
    for step in range(num_points):
        x = (x + r * y * (1 - y)) % 1
        y = (y + r * x * (1 - x)) % 1
        orbit[:, step, 0], orbit[:, step, 1] = x, y
    return cloud_dataset(
        "ORBIT5K",
        orbit.reshape(-1, 2),
        np.full(len(r), num_points),
        torch.arange(len(PARAMETERS)).repeat(num_per_class),
        tuple(str(value) for value in PARAMETERS),
        folds=tuple(_draw(num_per_class, draw) for draw in range(_NUM_DRAWS)),
    )


def _draw(num_per_class: int, seed: int) -> Fold:
    """Stratified: each class gives its share to every part."""
    random = np.random.default_rng(seed)
    parts: tuple[list[np.ndarray], ...] = ([], [], [])
    num_test = round(_TEST_SHARE * num_per_class)
    num_validation = round(_VALIDATION_SHARE * (num_per_class - num_test))
    for number in range(len(PARAMETERS)):
        orbits = number + len(PARAMETERS) * random.permutation(num_per_class)
        cut = np.split(orbits, [num_test, num_test + num_validation])
        for part, found in zip(parts, (cut[2], cut[1], cut[0]), strict=True):
            part.append(found)
    return Fold(*(np.sort(np.concatenate(part)) for part in parts))
