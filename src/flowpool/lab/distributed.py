"""One model on several processes or machines, with what PyTorch brings: torchrun and DistributedDataParallel.

On two processes of this machine::

    torchrun --nproc-per-node 2 -m flowpool.lab.distributed PROTEINS --pool flow --backbone gin --channels 32

On two machines, the same with ``--nnodes 2 --rdzv-backend c10d --rdzv-endpoint FIRST_MACHINE:29500`` on each. Without
torchrun it trains in one process. Every mini-batch is dealt out to the processes, so that the batch size means the same
for any number of them, and the gradient is that of the whole mini-batch. BatchNorm is the exception: each process
normalises by its own graphs.
"""

from __future__ import annotations

import os
from typing import Annotated

import torch
import typer
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from flowpool.lab.configuration import Configuration
from flowpool.lab.datasets import Source
from flowpool.lab.evaluate import graded
from flowpool.lab.leakproof import Practice, divide
from flowpool.lab.metrics import Metric
from flowpool.lab.model import GraphModel
from flowpool.lab.names import Backbone, Preset
from flowpool.lab.networks import LearnedNetwork, NetworkLearner
from flowpool.lab.options import Schedule
from flowpool.lab.pools import POOLS
from flowpool.lab.results import Run
from flowpool.lab.training import Share, Trained, train


def evaluate_together(configuration: Configuration, pool: str, fold: int) -> tuple[GraphModel, Trained, Run]:
    """Trains one model with all processes of the group, and tests it; every process ends with the same weights.

    Args:
        configuration: with one setting.
        pool: its name.
        fold: of the first repeat.
    """
    (setting,) = configuration.grid.settings()
    practice, exam = divide(configuration.prepared, configuration.folds(0)[fold])
    model = NetworkLearner(configuration, pool).model(practice.graphs, setting, configuration.seed)
    schedule, metric = configuration.schedule_of(setting), configuration.measure
    trained = train_together(model, practice, schedule, configuration.seed, metric)
    learned = LearnedNetwork(model, trained, schedule.batch_size, metric.ranks)
    return model, trained, graded(learned, exam, metric)


def train_together(model: GraphModel, practice: Practice, schedule: Schedule, seed: int, metric: Metric) -> Trained:
    """`train` by all processes; the model is the same on every one of them."""
    if not distributed.is_initialized():
        return train(model, practice, schedule, seed, metric=metric)
    share = Share(distributed.get_rank(), distributed.get_world_size(), agree_with_first)
    network = DistributedDataParallel(model, find_unused_parameters=has_idle_weights(model, practice))
    return train(model, practice, schedule, seed, metric=metric, network=network, share=share)


def has_idle_weights(model: GraphModel, practice: Practice) -> bool:
    """Whether some weights get no gradient: some pools pass none to what is before them."""
    part = practice.graphs.batch(practice.train[:2])
    model.fit(part)  # training will fit it again, to all graphs
    output = model.eval()(part.x, part.edge_index, part.batch, len(part.y), part.edge_features)
    total = output.outputs.sum() + output.loss
    return None in torch.autograd.grad(total, list(model.parameters()), allow_unused=True)


def agree_with_first(values: Tensor) -> None:
    """Overwrites the values with those of the first process: rounding may differ between machines."""
    distributed.broadcast(values, src=0)


def main(
    dataset: Annotated[str, typer.Argument(help="Name of the dataset.")] = "MUTAG",
    pool: Annotated[str, typer.Option(help="Pool to train.")] = "flow",
    preset: Annotated[Preset, typer.Option(help="Model and training.")] = "plain",
    backbone: Annotated[Backbone, typer.Option(help="Network before the pool.")] = "gin",
    channels: Annotated[int, typer.Option(help="Node features that the pool sees.")] = 32,
    points: Annotated[int, typer.Option(help="Points per graph.")] = 5,
    fold: Annotated[int, typer.Option(help="Fold of the published splits.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Graphs per step, over all processes.")] = 32,
    max_epochs: Annotated[int, typer.Option(help="At most so many epochs.")] = 300,
    seed: Annotated[int, typer.Option(help="Seed of weights and order.")] = 0,
    data: Annotated[str | None, typer.Option(help="Folder with datasets.")] = None,
) -> None:
    """Train one model on all processes that torchrun started, and print its score on the test graphs."""
    if pool not in POOLS:
        raise typer.BadParameter(f"pool {pool!r}; see flowpool evaluate --help.")
    together = "RANK" in os.environ  # set by torchrun
    if together:
        distributed.init_process_group("gloo")
    try:
        given = {"backbone": backbone, "channels": (channels,), "num_points": points}
        given |= {"batch_size": batch_size, "max_epochs": max_epochs}
        configuration = Configuration.made(Source(dataset, data), "paper", preset, None, seed, given)
        model, trained, run = evaluate_together(configuration, pool, fold)
        if not together or distributed.get_rank() == 0:
            weights = sum(float(w.detach().double().abs().sum()) for w in model.parameters())
            typer.echo(
                f"{dataset} fold {fold}, {pool}: {configuration.measure.name} {run.score:.4f}, validation loss "
                f"{trained.validation_loss:.6f} at epoch {trained.best_epoch + 1} of {len(trained.curve.train_loss)}, "
                f"sum of |weights| {weights:.6f}, {trained.seconds:.1f} s on "
                f"{distributed.get_world_size() if together else 1} processes"
            )
    finally:
        if together:
            distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    typer.run(main)
