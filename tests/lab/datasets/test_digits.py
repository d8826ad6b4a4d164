"""Digits as weighted clouds: every image can be painted again."""

import hashlib

import numpy as np
from sklearn.datasets import load_digits

from flowpool.lab.datasets import load_dataset
from flowpool.lab.datasets.digits import SHA256, SIDE, digits_file
from flowpool.lab.leakproof import subset


def test_clouds_are_the_images():
    images, labels = load_digits(return_X_y=True)
    digits = load_dataset("DIGITS")
    assert len(digits) == 1797 and digits.labels.tolist() == labels.tolist()
    canvas = np.zeros((len(digits), SIDE, SIDE))
    image = np.repeat(np.arange(len(digits)), digits.node_ptr.diff().numpy())
    column, height = digits.features.int().numpy().T
    canvas[image, SIDE - 1 - height, column] = digits.masses
    np.testing.assert_array_equal(canvas.reshape(len(digits), -1), images)
    sizes = digits.node_ptr.diff()
    assert (int(sizes.min()), int(sizes.max())) == (16, 42)


def test_the_file_is_the_known_one():
    assert hashlib.sha256(digits_file().read_bytes()).hexdigest() == SHA256


def test_a_subset_keeps_its_masses():
    digits = load_dataset("DIGITS")
    chosen = subset(digits, np.array([7, 3]))
    for place, number in enumerate((7, 3)):
        own = slice(int(digits.node_ptr[number]), int(digits.node_ptr[number + 1]))
        here = slice(int(chosen.node_ptr[place]), int(chosen.node_ptr[place + 1]))
        assert chosen.masses[here].tolist() == digits.masses[own].tolist()
        assert chosen.features[here].tolist() == digits.features[own].tolist()
