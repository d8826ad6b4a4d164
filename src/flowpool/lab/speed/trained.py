"""Times that are true to life: features of a network that was trained, batch by batch, and whole epochs of training.

Features are those of a GIN trained with sum pooling, so that every pool meets the same ones. Pools take turns on each batch,
as everywhere here. With one thread the processor's time is counted, which others on the machine do not disturb;
with more threads it is the time that passes.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flowpool import Status, flow_pool
from flowpool.lab.backbones import GIN
from flowpool.lab.datasets import DatasetNotFoundError, GraphBatch, GraphDataset, load_dataset
from flowpool.lab.leakproof import batches
from flowpool.lab.speed.peers import BASE, pooling_layers
from flowpool.lab.speed.turns import in_turns, shortest, whole
from flowpool.lab.training import mini_batches
from flowpool.lab.workers import threads
from flowpool.nn.pool import FlowPool

# Dataset, d, M.
SETTINGS = (
    ("MUTAG", 16, 5),
    ("MUTAG", 16, 8),
    ("MUTAG", 16, 16),
    ("ENZYMES", 16, 5),
    ("ENZYMES", 32, 8),
    ("PROTEINS", 32, 8),
    ("NCI1", 64, 8),
    ("IMDB-BINARY", 16, 8),
    ("DD", 32, 16),
)
DATASETS = tuple(dict.fromkeys(name for name, _, _ in SETTINGS))
FLOW = "FlowPool"
EPOCHS = 20
BATCH_SIZE = 32
SLOW = 100  # steps above which a graph is called a straggler


@dataclass(frozen=True)
class TrainedRow:
    """One line of the table: a pool on all batches of an epoch. Times of a batch are forward + backward, the best of several."""

    case: str
    method: str
    threads: int
    median: float  # ms of the median batch
    worst: float  # ms of the slowest
    ratio: float  # time of all batches / that of GraphMultisetTransformer
    median_ratio: float  # median over batches of the same
    epoch: float  # seconds of one epoch of training with this pool, network and optimiser included
    stationary: float | None = None  # share of graphs
    singular: float | None = None  # share of graphs whose minimiser is not isolated
    settled: float | None = None  # share of graphs that ended in a valley, with a residual above the tolerance
    slow: float | None = None  # share of graphs with more than SLOW steps
    slow_steps: float | None = None  # their share of all steps


def run_trained(
    names: Sequence[str] = DATASETS, data: str | None = None, counts: Sequence[int] = (1, 2), rounds: int = 3
) -> Iterator[TrainedRow]:
    """Rows one by one. Datasets that are not on this machine are left out.

    Args:
        names: datasets, of `DATASETS`.
        data: folder with the data.
        counts: of threads to run everything with.
        rounds: how often each batch is timed.
    """
    unknown = [name for name in names if name not in DATASETS]
    if unknown:
        raise ValueError(f"No trained rows for {', '.join(unknown)}; there are {', '.join(DATASETS)}.")
    for name, width, num_points in SETTINGS:
        if name not in names:
            continue
        try:
            dataset = load_dataset(name, data, download=False)
        except DatasetNotFoundError:
            continue
        with threads(1):
            backbone = trained_backbone(dataset, width, EPOCHS)
        for number in counts:
            with threads(number):
                yield from _rows(dataset, backbone, width, num_points, number, rounds)


def epoch_of(dataset: GraphDataset, seed: int = 0) -> list[GraphBatch]:
    """All graphs in a random order, in mini-batches."""
    return list(batches(dataset, mini_batches(len(dataset), BATCH_SIZE, torch.Generator().manual_seed(seed))))


def trained_backbone(dataset: GraphDataset, width: int, epochs: int) -> GIN:
    """A GIN after some epochs with sum pooling, the same on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone = GIN(dataset.num_features, width)
        step = Training(backbone, pooling_layers(width, 1)["SumAggregation"], dataset)
        for epoch in range(epochs):
            for part in epoch_of(dataset, epoch):
                step(part)
    return backbone


class Training:
    """A classifier in training: a call is one step on one batch."""

    def __init__(self, backbone: GIN, pool: nn.Module, dataset: GraphDataset) -> None:
        self.backbone, self.pool = backbone.train(), pool
        width = self.pooled(dataset.batch([0, 1])).shape[1]
        self.head = nn.Linear(width, dataset.num_classes)
        modules = nn.ModuleList([self.backbone, self.pool, self.head])
        self.optimizer = torch.optim.Adam(modules.parameters(), 0.01, fused=True)

    def pooled(self, part: GraphBatch) -> Tensor:
        result: Tensor = self.pool(self.backbone(part.x, part.edge_index), part.batch, dim_size=len(part.y))
        return result

    def __call__(self, part: GraphBatch) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.head(self.pooled(part)), part.y).backward()
        self.optimizer.step()


def _rows(
    dataset: GraphDataset, backbone: GIN, width: int, num_points: int, threads: int, rounds: int
) -> Iterator[TrainedRow]:
    torch.manual_seed(0)
    flow = FlowPool(width, num_points)
    pools: dict[str, nn.Module] = {FLOW: flow, **pooling_layers(width, num_points)}
    parts = epoch_of(dataset)
    clock = time.process_time if threads == 1 else time.perf_counter
    features = _features(backbone, parts)
    times: dict[str, list[float]] = {name: [] for name in pools}
    for part, nodes in zip(parts, features, strict=True):
        work = {name: whole(_pooling(pool, nodes, part), clock) for name, pool in pools.items()}
        for name, taken in in_turns(work, rounds).items():
            times[name].append(1e3 * shortest(taken)[0])
    steps = {name: Training(copy.deepcopy(backbone), pool, dataset) for name, pool in pools.items()}
    for step in steps.values():
        step(parts[0])
    epochs = dict.fromkeys(pools, 0.0)
    for part in parts:
        once = {name: whole(partial(step, part), clock) for name, step in steps.items()}
        for name, taken in in_turns(once, 1, warm=False).items():
            epochs[name] += taken[0][0]
    report = _report(flow, features, parts)
    for name, found in times.items():
        yield TrainedRow(
            f"{dataset.name} d={width} M={num_points}",
            name,
            threads,
            statistics.median(found),
            max(found),
            sum(found) / sum(times[BASE]),
            statistics.median(one / other for one, other in zip(found, times[BASE], strict=True)),
            epochs[name],
            *(report if name == FLOW else ()),
        )


@torch.no_grad()
def _features(backbone: GIN, parts: list[GraphBatch]) -> list[Tensor]:
    backbone.train()
    return [backbone(part.x, part.edge_index) for part in parts]


def _pooling(pool: nn.Module, nodes: Tensor, part: GraphBatch) -> Callable[[], None]:
    """Forward and backward of a pool."""

    def work() -> None:
        pool(nodes.detach().requires_grad_(), part.batch, dim_size=len(part.y)).square().sum().backward()

    return work


def _report(pool: FlowPool, features: list[Tensor], parts: list[GraphBatch]) -> tuple[float, ...]:
    """Shares: stationary, singular, settled, slow, and steps of the slow."""
    status, settled, steps = [], [], []
    for nodes, part in zip(features, parts, strict=True):
        pooled = flow_pool(nodes, part.batch, reference=pool.reference, dim_size=len(part.y))
        status.append(pooled.status)
        settled.append(pooled.settled)
        steps.append(pooled.steps)
    codes, counts = torch.cat(status), torch.cat(steps).double()
    stationary = (codes == Status.OK.value) | (codes == Status.SINGULAR.value)
    slow = counts > SLOW
    return (
        float(stationary.double().mean()),
        float((codes == Status.SINGULAR.value).double().mean()),
        float(torch.cat(settled).double().mean()),
        float(slow.double().mean()),
        float(counts[slow].sum() / counts.sum()),
    )
