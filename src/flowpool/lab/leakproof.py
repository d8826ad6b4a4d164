"""A fold in two halves that cannot reach each other: what training may see, and what it is judged by.

Training gets a `Practice`, which holds copies of the training and validation graphs and nothing else. The test graphs
and their labels are in the `Exam`, which is opened once training is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowpool.lab.datasets import Fold, GraphBatch, GraphDataset


@dataclass(frozen=True, eq=False)
class Practice:
    """Training and validation graphs of one fold, numbered anew from zero, training graphs first."""

    graphs: GraphDataset
    num_train: int

    @property
    def train(self) -> Tensor:
        return torch.arange(self.num_train)

    @property
    def validation(self) -> Tensor:
        return torch.arange(self.num_train, len(self.graphs))


class Exam:
    """The test graphs of one fold. Predictions are asked for once, by who has been trained."""

    def __init__(self, graphs: GraphDataset) -> None:
        self._graphs = graphs

    def __len__(self) -> int:
        return len(self._graphs)

    @property
    def labels(self) -> list[Any]:
        """The truth, for whoever grades."""
        return self._graphs.labels.tolist()

    def taken_by(self, predict: Callable[[GraphDataset], NDArray[Any]]) -> NDArray[Any]:
        """What ``predict`` says of the test graphs."""
        return predict(self._graphs)


def divide(dataset: GraphDataset, fold: Fold) -> tuple[Practice, Exam]:
    """The two halves of a fold; they share no memory with each other or with the dataset."""
    practice = subset(dataset, np.concatenate([fold.train, fold.validation]))
    return Practice(practice, len(fold.train)), Exam(subset(dataset, fold.test))


def subset(dataset: GraphDataset, numbers: np.ndarray) -> GraphDataset:
    """The chosen graphs, copied, as a dataset of their own."""
    chosen = torch.as_tensor(numbers, dtype=torch.int64)
    part, masses = dataset.batch(chosen), dataset.masses
    nodes, edges = dataset.node_ptr.diff()[chosen], dataset.edge_ptr.diff()[chosen]
    starts = torch.repeat_interleave(nodes.cumsum(0) - nodes, edges)  # (E,)
    parts = () if masses is None else masses.split(dataset.node_ptr.diff().tolist())
    return replace(
        dataset,
        features=part.x,
        node_ptr=_ends(nodes),
        edge_index=part.edge_index - starts,
        edge_ptr=_ends(edges),
        labels=part.y,
        masses=None if masses is None else torch.cat([parts[number] for number in chosen.tolist()]),
        edge_features=part.edge_features,
        keys=None,
        places=None,
        folds=None,
    )


def _ends(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def batches(graphs: GraphDataset, parts: Sequence[Tensor]) -> Iterator[GraphBatch]:
    """One batch per part, which is a list of graph numbers.

    Collecting the graphs is a good share of the time of an epoch on small graphs, so it is done once for all parts.
    """
    order = torch.cat(list(parts))
    whole = graphs.batch(order)
    nodes = _starts(graphs.node_ptr.diff()[order], parts)
    edges = _starts(graphs.edge_ptr.diff()[order], parts)
    first_graph = 0
    for place, part in enumerate(parts):
        own_nodes = slice(nodes[place], nodes[place + 1])
        own_edges = slice(edges[place], edges[place + 1])
        last_graph = first_graph + len(part)
        yield GraphBatch(
            whole.x[own_nodes],
            whole.edge_index[:, own_edges] - own_nodes.start,
            whole.batch[own_nodes] - first_graph,
            whole.y[first_graph:last_graph],
            None if whole.edge_features is None else whole.edge_features[own_edges],
        )
        first_graph = last_graph


def _starts(sizes: Tensor, parts: Sequence[Tensor]) -> list[int]:
    """Where each part begins, and the end, if the graphs of these sizes stand one after the other."""
    ends = _ends(sizes)
    graphs = torch.tensor([0] + [len(part) for part in parts]).cumsum(0)
    starts: list[int] = ends[graphs].tolist()
    return starts
