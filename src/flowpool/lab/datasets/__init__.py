"""Datasets of the lab: graphs in TU format, their splits, and synthetic shapes."""

from flowpool.lab.datasets.catalog import KNOWN, CatalogEntry, find_dataset, list_datasets, load_dataset
from flowpool.lab.datasets.errors import ArchiveError, ChecksumError, DatasetFormatError, DatasetNotFoundError
from flowpool.lab.datasets.record import Graph, GraphBatch, GraphDataset
from flowpool.lab.datasets.shapes import make_shapes
from flowpool.lab.datasets.splits import Fold, load_splits, repeat_splits
from flowpool.lab.datasets.tu import read_tu

__all__ = [
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
    "make_shapes",
    "read_tu",
    "repeat_splits",
]
