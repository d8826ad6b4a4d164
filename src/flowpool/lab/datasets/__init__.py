"""Datasets of the lab: graphs in TU format, molecules, bags, digits, shapes and orbits, a reader's own files; and folds."""

from flowpool.lab.datasets.bags import BAGS
from flowpool.lab.datasets.catalog import KNOWN, CatalogEntry, find_dataset, list_datasets, load_dataset
from flowpool.lab.datasets.digits import make_digits
from flowpool.lab.datasets.drawn import draw_folds, kept_apart
from flowpool.lab.datasets.errors import ArchiveError, ChecksumError, DatasetFormatError, DatasetNotFoundError
from flowpool.lab.datasets.orbits import make_orbits
from flowpool.lab.datasets.record import Fold, Graph, GraphBatch, GraphDataset, require_equal_masses
from flowpool.lab.datasets.shapes import make_shapes
from flowpool.lab.datasets.source import Source, load_graphs
from flowpool.lab.datasets.splits import load_splits, origin_of_splits
from flowpool.lab.datasets.tables import read_molecules, read_sets
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
    "Source",
    "draw_folds",
    "kept_apart",
    "make_orbits",
    "read_molecules",
    "read_sets",
    "find_dataset",
    "list_datasets",
    "load_dataset",
    "load_graphs",
    "load_splits",
    "make_digits",
    "make_shapes",
    "origin_of_splits",
    "read_tu",
    "require_equal_masses",
]
