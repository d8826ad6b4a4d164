"""Datasets of the lab: graphs in TU format, bags, digits, synthetic shapes, and their splits."""

from flowpool.lab.datasets.bags import BAGS
from flowpool.lab.datasets.catalog import KNOWN, CatalogEntry, find_dataset, list_datasets, load_dataset
from flowpool.lab.datasets.digits import make_digits
from flowpool.lab.datasets.errors import ArchiveError, ChecksumError, DatasetFormatError, DatasetNotFoundError
from flowpool.lab.datasets.record import Graph, GraphBatch, GraphDataset, require_equal_masses
from flowpool.lab.datasets.shapes import make_shapes
from flowpool.lab.datasets.splits import Fold, load_splits, origin_of_splits, repeat_splits
from flowpool.lab.datasets.tu import read_tu

__all__ = [
    "BAGS",
    "KNOWN",
    "ArchiveError",
    "CatalogEntry",
    "ChecksumError",
    "DatasetFormatError",
    "DatasetNotFoundError",
    "Fold",
    "Graph",
    "GraphBatch",
    "GraphDataset",
    "find_dataset",
    "list_datasets",
    "load_dataset",
    "load_splits",
    "make_digits",
    "make_shapes",
    "origin_of_splits",
    "read_tu",
    "repeat_splits",
    "require_equal_masses",
]
