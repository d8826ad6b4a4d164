"""Training of one classifier on one fold: Adam, mini-batches, early stopping on the validation graphs."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flowpool.lab.datasets import GraphBatch
from flowpool.lab.leakproof import Practice, batches
from flowpool.lab.model import Classifier, Output, derived_seed

StopOn = Literal["loss", "accuracy"]


class Network(Protocol):
    """A `Classifier`, or one that is wrapped for training on several processes."""

    def __call__(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Output: ...


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train; the defaults are the paper's (section 9).

    Attributes:
        learning_rate: of Adam.
        batch_size: graphs per step.
        max_epochs: at most so many.
        patience: epochs without a better validation value after which training ends.
        stop_on: the validation value: cross-entropy, or accuracy.
        weight_decay: of Adam, decoupled.
        cosine: whether the learning rate falls to zero over all epochs along a cosine.
        settling: share of the epochs at the beginning from which no weights are kept.
    """

    learning_rate: float = 0.01
    batch_size: int = 32
    max_epochs: int = 300
    patience: int = 20
    stop_on: StopOn = "loss"
    weight_decay: float = 0.0
    cosine: bool = False
    settling: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"The learning rate is {self.learning_rate}; it must be a positive number.")
        if self.batch_size < 2:
            raise ValueError(f"The batch size is {self.batch_size}; BatchNorm needs at least 2 graphs.")
        if self.max_epochs < 1 or self.patience < 1:
            raise ValueError(f"{self.max_epochs} epochs with patience {self.patience}; both must be at least 1.")
        if self.stop_on not in get_args(StopOn):
            raise ValueError(f"Unknown criterion {self.stop_on!r}; pass {', '.join(get_args(StopOn))}.")


@dataclass(frozen=True)
class Curve:
    """One value per epoch."""

    train_loss: list[float]
    validation_loss: list[float]
    validation_accuracy: list[float]


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
    def validation_accuracy(self) -> float:
        return self.curve.validation_accuracy[self.best_epoch]

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
    model: Classifier,
    practice: Practice,
    schedule: Schedule,
    seed: int,
    *,
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
        everything = practice.graphs.batch(practice.train)
        model.fit(everything.x, everything.edge_index, everything.batch, len(everything.y))
        for epoch in range(schedule.max_epochs):
            if schedule.cosine:
                for group in optimizer.param_groups:
                    group["lr"] = schedule.learning_rate * (1 + math.cos(math.pi * epoch / schedule.max_epochs)) / 2
            loss = _train_epoch(model, network, practice, optimizer, schedule.batch_size, order, share)
            values = torch.tensor([loss, *_assess(model, validation)], dtype=torch.float64)
            if share.agree is not None:
                share.agree(values)
            for column, value in zip(
                (curve.train_loss, curve.validation_loss, curve.validation_accuracy), values.tolist(), strict=True
            ):
                column.append(value)
            value = curve.validation_loss[-1] if schedule.stop_on == "loss" else -curve.validation_accuracy[-1]
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
    model: nn.Module,
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
        output = network(part.x, part.edge_index, part.batch, len(part.y))
        # Gradients of processes are averaged; weighted by what each process holds, that is the joint gradient.
        weight = len(part.y) * share.processes / len(numbers)
        loss = weight * (cross_entropy(output.logits, part.y) + output.loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(numbers) / share.processes
        count += len(part.y)
    return total / count


@torch.no_grad()
def _assess(model: Classifier, parts: list[GraphBatch]) -> tuple[float, float]:
    """Cross-entropy and accuracy over all graphs of the batches."""
    model.eval()
    loss, right, count = 0.0, 0, 0
    for part in parts:
        logits = model(part.x, part.edge_index, part.batch, len(part.y)).logits
        loss += cross_entropy(logits, part.y, reduction="sum").item()
        right += int((logits.argmax(1) == part.y).sum())
        count += len(part.y)
    return loss / count, right / count
