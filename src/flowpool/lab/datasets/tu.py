"""The text format of the TU Dortmund collection, read into a :class:`GraphDataset`.

A dataset NAME is a handful of text files. ``NAME_graph_indicator.txt`` gives the graph of every node,
``NAME_A.txt`` the edges as pairs of nodes, ``NAME_graph_labels.txt`` the class of every graph; optional are
``NAME_node_labels.txt`` and ``NAME_node_attributes.txt``. Nodes and graphs are counted from 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch

from flowpool.lab.datasets.archive import read_archive, read_folder
from flowpool.lab.datasets.errors import ArchiveError, DatasetFormatError
from flowpool.lab.datasets.record import GraphDataset, both_directions, offsets
from flowpool.lab.datasets.text import read_decimals, read_integers

NodeFeatures = Literal["degree", "constant"]

MAX_DEGREE = 128  # one-hot degrees end here: every larger degree shares the last column
MAX_NODE_LABELS = 1024  # a column each; the known datasets have at most 82
ATOMS = ("C", "N", "O", "F", "I", "Cl", "Br")  # of MUTAG, in the order of its one-hot features


@dataclass(frozen=True, eq=False)
class TUContent:
    """What the files of a TU dataset say, checked and free of their spelling.

    Attributes:
        graph_of_node: ``(N,)``, ascending from 0 to B-1 without gaps.
        edges: ``(2, E)``, distinct, both directions, sorted; nodes counted from 0 over all graphs.
        graph_labels: ``(B,)``, as in the file.
        node_labels: ``(N,)`` as in the file, or None.
        node_attributes: ``(N, D)`` float64, or None.
    """

    graph_of_node: np.ndarray
    edges: np.ndarray
    graph_labels: np.ndarray
    node_labels: np.ndarray | None
    node_attributes: np.ndarray | None

    def sha256(self) -> str:
        """Checksum of the content: equal for any order of the edges, blanks, line ends and packing."""
        digest = hashlib.sha256()
        for part in (
            self.graph_of_node,
            self.edges,
            self.graph_labels,
            self.node_labels,
            self.node_attributes,
        ):
            # Shapes are hashed too, else numbers could move from one part to the next unnoticed.
            digest.update(b"absent;" if part is None else f"{part.dtype.kind}{part.shape};".encode())
            if part is not None:
                digest.update(np.ascontiguousarray(part, part.dtype.newbyteorder("<")).tobytes())
        return digest.hexdigest()


def read_tu(path: str | Path, name: str | None = None, *, node_features: NodeFeatures = "degree") -> GraphDataset:
    """The dataset in the zip archive or folder ``path``.

    Args:
        path: ``NAME.zip``, or a folder that holds ``NAME_A.txt`` and so on.
        name: NAME, when the archive or folder is called otherwise.
        node_features: what stands for node features in a dataset that has neither node labels nor
            attributes: ``"degree"`` one-hot degrees (those above 128 share a column), or ``"constant"`` ones.

    Raises:
        ArchiveError: the archive is damaged or unsafe, or a necessary file is missing.
        DatasetFormatError: a file is malformed; the message names file and line.
    """
    path = Path(path)
    name = name or (path.name if path.is_dir() else path.stem)
    return to_dataset(name, read_content(path, name), node_features)


def read_content(path: Path, name: str) -> TUContent:
    """What the files of dataset ``name`` in the archive or folder ``path`` say."""
    wanted = tuple(_file(name, part) for part in _PARTS)
    files = read_folder(path, wanted) if path.is_dir() else read_archive(path, name, wanted)
    missing = [_file(name, part) for part in _NECESSARY if _file(name, part) not in files]
    if missing:
        raise ArchiveError(f"{path} lacks {', '.join(missing)}; is it a TU dataset with the name {name!r}?")
    return parse(name, files)


def parse(name: str, files: Mapping[str, bytes]) -> TUContent:
    """What the texts ``files``, file name to bytes, say; every count checked against the others."""
    file = _file(name, "graph_indicator")
    indicator = read_integers(file, files[file], 1)[:, 0]  # (N,)
    _check_graphs(file, indicator)
    num_nodes, num_graphs = len(indicator), int(indicator[-1])

    file = _file(name, "graph_labels")
    graph_labels = read_integers(file, files[file], 1)[:, 0]  # (B,)
    _check_count(file, len(graph_labels), num_graphs, "graphs")

    file = _file(name, "A")
    pairs = read_integers(file, files[file], 2)  # (e, 2)
    _check_edges(file, pairs, indicator)

    node_labels = node_attributes = None
    file = _file(name, "node_labels")
    if file in files:
        node_labels = read_integers(file, files[file], 1)[:, 0]  # (N,)
        _check_count(file, len(node_labels), num_nodes, "nodes")
        _check_variety(file, node_labels)
    file = _file(name, "node_attributes")
    if file in files:
        node_attributes = read_decimals(file, files[file])  # (N, D)
        _check_count(file, len(node_attributes), num_nodes, "nodes")

    edges = both_directions(pairs - 1, num_nodes)  # (2, E)
    return TUContent(indicator - 1, edges, graph_labels, node_labels, node_attributes)


def to_dataset(name: str, content: TUContent, node_features: NodeFeatures = "degree") -> GraphDataset:
    """The content as node features, edges counted within each graph, and classes 0..C-1."""
    num_graphs = len(content.graph_labels)
    graph_of_edge = content.graph_of_node[content.edges[0]]  # (E,)
    node_ptr = offsets(np.bincount(content.graph_of_node, minlength=num_graphs))
    edge_ptr = offsets(np.bincount(graph_of_edge, minlength=num_graphs))
    classes, labels = np.unique(content.graph_labels, return_inverse=True)
    return GraphDataset(
        name=name,
        features=torch.from_numpy(_features(content, node_features)),
        node_ptr=node_ptr,
        edge_index=torch.from_numpy(content.edges) - node_ptr[torch.from_numpy(graph_of_edge)],
        edge_ptr=edge_ptr,
        labels=torch.from_numpy(labels.astype(np.int64)),
        class_names=tuple(str(label) for label in classes),
    )


_NECESSARY = ("A", "graph_indicator", "graph_labels")
_PARTS = (*_NECESSARY, "node_labels", "node_attributes")


def _file(name: str, part: str) -> str:
    return f"{name}_{part}.txt"


def _features(content: TUContent, node_features: NodeFeatures) -> np.ndarray:
    """``(N, D)`` float32: one-hot node labels, then attributes, whichever there are."""
    if node_features not in get_args(NodeFeatures):
        raise ValueError(f"node_features is {node_features!r}; it can be 'degree' or 'constant'.")
    num_nodes = len(content.graph_of_node)
    parts = []
    if content.node_labels is not None:
        parts.append(_one_hot(np.unique(content.node_labels, return_inverse=True)[1]))
    if content.node_attributes is not None:
        parts.append(content.node_attributes.astype(np.float32))
    if parts:
        return np.concatenate(parts, axis=1)
    if node_features == "degree":
        degree = np.bincount(content.edges[0], minlength=num_nodes)  # (N,)
        return _one_hot(np.minimum(degree, MAX_DEGREE))
    return np.ones((num_nodes, 1), np.float32)


def _one_hot(numbers: np.ndarray) -> np.ndarray:
    table = np.zeros((len(numbers), int(numbers.max()) + 1), np.float32)
    table[np.arange(len(numbers)), numbers] = 1
    return table


def _check_graphs(file: str, indicator: np.ndarray) -> None:
    if len(indicator) == 0:
        raise DatasetFormatError(file, 1, "the file is empty; every node needs a line with its graph.")
    previous = np.concatenate([[0], indicator[:-1]])
    # Compared, not subtracted: the difference of two huge numbers would wrap around.
    in_order = (indicator == previous) | (indicator == previous + 1)
    in_order[0] = indicator[0] == 1
    if not in_order.all():
        row = int(np.argmin(in_order))
        after = f"after graph {previous[row]}" if row else "at the beginning"
        problem = (
            f"graph {indicator[row]} {after}; graphs are numbered 1, 2, 3, ... without gaps "
            "and the nodes of a graph stand together."
        )
        raise DatasetFormatError(file, row + 1, problem)


def _check_count(file: str, found: int, expected: int, what: str) -> None:
    if found != expected:
        # The first line that is missing, or the first that is too much.
        line = min(found, expected) + 1
        raise DatasetFormatError(file, line, f"{found} lines for {expected} {what} of the graph indicator.")


def _check_edges(file: str, pairs: np.ndarray, indicator: np.ndarray) -> None:
    outside = ((pairs < 1) | (pairs > len(indicator))).any(axis=1)  # (e,)
    if outside.any():
        row = int(np.argmax(outside))
        first, second = pairs[row]
        problem = f"edge {first}, {second}, but there are nodes 1 to {len(indicator)} only."
        raise DatasetFormatError(file, row + 1, problem)
    ends = indicator[pairs - 1]  # (e, 2)
    across = ends[:, 0] != ends[:, 1]
    if across.any():
        row = int(np.argmax(across))
        first, second = pairs[row]
        problem = f"edge {first}, {second} joins graphs {ends[row, 0]} and {ends[row, 1]}."
        raise DatasetFormatError(file, row + 1, problem)


def _check_variety(file: str, node_labels: np.ndarray) -> None:
    first_rows = np.sort(np.unique(node_labels, return_index=True)[1])
    if len(first_rows) > MAX_NODE_LABELS:
        problem = (
            f"{len(first_rows)} different node labels, each of which would become a feature; "
            f"at most {MAX_NODE_LABELS} are allowed. Numbers that measure belong into node_attributes."
        )
        raise DatasetFormatError(file, int(first_rows[MAX_NODE_LABELS]) + 1, problem)
