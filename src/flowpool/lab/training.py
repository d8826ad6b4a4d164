"""Training of one model on one fold: Adam, mini-batches, early stopping on the validation graphs."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from flowpool.lab.datasets import GraphBatch, GraphDataset
from flowpool.lab.leakproof import Practice, batches
from flowpool.lab.metrics import METRICS, Metric
from flowpool.lab.model import GraphModel, Output, derived_seed
from flowpool.lab.options import Schedule


class Network(Protocol):
    """A `GraphModel`, or one that is wrapped for training on several processes."""

    def __call__(
        self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int, edge_features: Tensor | None
    ) -> Output: ...


@dataclass(frozen=True)
class Curve:
    """One value per epoch."""

    train_loss: list[float]
    validation_loss: list[float]
    validation_score: list[float]


@dataclass(frozen=True)
class Trained:
    """The end of a training; the model itself holds the weights of the best epoch.

    Attributes:
        curve: all epochs.
        best_epoch: whose weights were kept, counted from 0.
        seconds: wall time of all epochs.
    """

    curve: Curve
    best_epoch: int
    seconds: float

    @property
    def validation_score(self) -> float:
        return self.curve.validation_score[self.best_epoch]

    @property
    def validation_loss(self) -> float:
        return self.curve.validation_loss[self.best_epoch]


class Share(NamedTuple):
    """Which part of each mini-batch this process works on; alone, it does everything.

    ``agree`` makes all processes go on with the numbers of the first one, so that they stop at the same epoch.
    """

    rank: int = 0
    processes: int = 1
    agree: Callable[[Tensor], None] | None = None


def train(
    model: GraphModel,
    practice: Practice,
    schedule: Schedule,
    seed: int,
    *,
    metric: Metric = METRICS["accuracy"],
    network: Network | None = None,
    share: Share | None = None,
) -> Trained:
    """Trains the model and leaves it with the weights of its best validation epoch.

    Args:
        model: fresh; changed in place.
        practice: training and validation graphs. The order of mini-batches depends on their number and the seed
            alone, so it is the same for every model.
        schedule: see `Schedule`.
        seed: of the order, and of whatever the model draws while it is trained.
        metric: of the validation graphs.
        network: the model as it is called in training steps, if that is a wrapper.
        share: of this process, if there are several.
    """
    share, network = share or Share(), network or model
    optimizer = torch.optim.AdamW(
        model.parameters(), schedule.learning_rate, weight_decay=schedule.weight_decay, fused=True
    )
    first = int(schedule.settling * schedule.max_epochs)  # epoch from which weights are kept
    order = torch.Generator().manual_seed(derived_seed(seed, "order"))
    validation = list(batches(practice.graphs, practice.validation.split(schedule.batch_size)))
    curve = Curve([], [], [])
    best, best_value, kept = 0, math.inf, copy.deepcopy(model.state_dict())
    began = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, "training"))
        model.fit(practice.graphs.batch(practice.train))
        for epoch in range(schedule.max_epochs):
            if schedule.cosine:
                for group in optimizer.param_groups:
                    group["lr"] = schedule.learning_rate * (1 + math.cos(math.pi * epoch / schedule.max_epochs)) / 2
            loss = _train_epoch(model, network, practice, optimizer, schedule.batch_size, order, share)
            values = torch.tensor([loss, *_assess(model, validation, metric)], dtype=torch.float64)
            if share.agree is not None:
                share.agree(values)
            for column, value in zip(
                (curve.train_loss, curve.validation_loss, curve.validation_score), values.tolist(), strict=True
            ):
                column.append(value)
            score = curve.validation_score[-1] if metric.lower_is_better else -curve.validation_score[-1]
            value = curve.validation_loss[-1] if schedule.stop_on == "loss" else score
            if epoch <= first or value < best_value:  # the first epoch counts even if it ended in NaN
                best, best_value, kept = epoch, value, copy.deepcopy(model.state_dict())
            elif epoch - best >= schedule.patience:
                break
    model.load_state_dict(kept)
    return Trained(curve, best, time.perf_counter() - began)


def mini_batches(num_graphs: int, batch_size: int, order: torch.Generator, smallest: int = 2) -> list[Tensor]:
    """A random order of the graphs, cut into mini-batches.

    A last one below ``smallest`` joins the one before: BatchNorm cannot learn from a single graph, and every process
    needs one.
    """
    parts = list(torch.randperm(num_graphs, generator=order).split(batch_size))
    if len(parts) > 1 and len(parts[-1]) < smallest:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def _train_epoch(
    model: GraphModel,
    network: Network,
    practice: Practice,
    optimizer: torch.optim.Optimizer,
    batch_size: int,
    order: torch.Generator,
    share: Share,
) -> float:
    """Mean training loss over the graphs of this process."""
    model.train()
    total, count = 0.0, 0
    parts = mini_batches(practice.num_train, batch_size, order, max(2, share.processes))
    own = [numbers[share.rank :: share.processes] for numbers in parts]
    for numbers, part in zip(parts, batches(practice.graphs, own), strict=True):
        output = network(part.x, part.edge_index, part.batch, len(part.y), part.edge_features)
        # Gradients of processes are averaged; weighted by what each process holds, that is the joint gradient.
        weight = len(part.y) * share.processes / len(numbers)
        loss = weight * (model.loss(output.outputs, part.y) + output.loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(numbers) / share.processes
        count += len(part.y)
    return total / count


@torch.no_grad()
def _outputs(model: GraphModel, parts: Iterable[GraphBatch]) -> Iterator[tuple[GraphBatch, Tensor]]:
    model.eval()
    for part in parts:
        yield part, model(part.x, part.edge_index, part.batch, len(part.y), part.edge_features).outputs


def _assess(model: GraphModel, parts: list[GraphBatch], metric: Metric) -> tuple[float, float]:
    """Loss and metric over all graphs of the batches."""
    total, predictions, truth = 0.0, [], []
    for part, outputs in _outputs(model, parts):
        total += model.loss(outputs, part.y, "sum").item()
        predictions.append(model.predictions(outputs, ranks=metric.ranks))
        truth.append(part.y)
    whole = torch.cat(truth)
    return total / len(whole), metric.score(torch.cat(predictions).numpy(), whole.numpy())


def predict(model: GraphModel, graphs: GraphDataset, batch_size: int, *, ranks: bool = False) -> NDArray[Any]:
    """What a trained model says of graphs, see `GraphModel.predictions`."""
    parts = batches(graphs, torch.arange(len(graphs)).split(batch_size))
    found = [model.predictions(outputs, ranks=ranks) for _, outputs in _outputs(model, parts)]
    predictions: NDArray[Any] = torch.cat(found).numpy()
    return predictions
