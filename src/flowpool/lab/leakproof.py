"""A fold in two halves that cannot reach each other: what training may see, and what it is judged by.

Training gets a `Practice`, which holds copies of the training and validation graphs and nothing else. The test graphs
and their labels are in the `Exam`, which is opened once training is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowpool.lab.datasets import Fold, Graph, GraphBatch, GraphDataset
from flowpool.lab.model import Classifier


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


@dataclass(frozen=True)
class Graded:
    """How a trained model did in an exam; entries in the order of the fold's test graphs."""

    predictions: list[int]
    labels: list[int]

    @property
    def accuracy(self) -> float:
        right = sum(one == other for one, other in zip(self.predictions, self.labels, strict=True))
        return right / len(self.labels)


class Exam:
    """The test graphs of one fold."""

    def __init__(self, graphs: GraphDataset) -> None:
        self._graphs = graphs

    def grade(self, model: Classifier, batch_size: int) -> Graded:
        """The final read-out."""
        model.eval()
        predictions: list[int] = []
        with torch.no_grad():
            for part in batches(self._graphs, torch.arange(len(self._graphs)).split(batch_size)):
                output = model(part.x, part.edge_index, part.batch, len(part.y))
                predictions += output.logits.argmax(1).tolist()
        return Graded(predictions, self._graphs.labels.tolist())


def divide(dataset: GraphDataset, fold: Fold) -> tuple[Practice, Exam]:
    """The two halves of a fold; they share no memory with each other or with the dataset."""
    practice = subset(dataset, np.concatenate([fold.train, fold.validation]))
    return Practice(practice, len(fold.train)), Exam(subset(dataset, fold.test))


def subset(dataset: GraphDataset, numbers: np.ndarray) -> GraphDataset:
    """The chosen graphs, copied, as a dataset of their own."""
    chosen: list[Graph] = [dataset[int(number)] for number in numbers]
    nodes = torch.tensor([0] + [len(graph.x) for graph in chosen])
    edges = torch.tensor([0] + [graph.edge_index.shape[1] for graph in chosen])
    masses, sizes = dataset.masses, dataset.node_ptr.diff().tolist()
    return GraphDataset(
        name=dataset.name,
        features=torch.cat([graph.x for graph in chosen]),
        node_ptr=nodes.cumsum(0),
        edge_index=torch.cat([graph.edge_index for graph in chosen], dim=1),
        edge_ptr=edges.cumsum(0),
        labels=torch.tensor([graph.y for graph in chosen]),
        class_names=dataset.class_names,
        masses=None if masses is None else _chosen(masses.split(sizes), numbers),
    )


def _chosen(parts: Sequence[Tensor], numbers: np.ndarray) -> Tensor:
    return torch.cat([parts[int(number)] for number in numbers])


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
        )
        first_graph = last_graph


def _starts(sizes: Tensor, parts: Sequence[Tensor]) -> list[int]:
    """Where each part begins, and the end, if the graphs of these sizes stand one after the other."""
    ends = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    graphs = torch.tensor([0] + [len(part) for part in parts]).cumsum(0)
    starts: list[int] = ends[graphs].tolist()
    return starts
