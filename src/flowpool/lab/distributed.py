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
from typing import Annotated, get_args

import torch
import typer
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from flowpool.lab.backbones import prepare
from flowpool.lab.datasets import GraphDataset
from flowpool.lab.evaluate import folds_of, load_graphs
from flowpool.lab.leakproof import Graded, Practice, divide
from flowpool.lab.model import Classifier, Shape, build_model
from flowpool.lab.names import Backbone
from flowpool.lab.pools import POOLS
from flowpool.lab.training import Schedule, Share, Trained, train


def train_together(
    model: Classifier, dataset: GraphDataset, fold: int, data: str | None, schedule: Schedule, seed: int
) -> tuple[Trained, Graded]:
    """Trains the model with all processes of the group, and tests it; every process ends with the same weights.

    Args:
        model: the same on every process.
        dataset: prepared for the model's backbone.
        fold, data: which fold of the first repeat, and where the splits are.
        schedule, seed: as in `train`.
    """
    practice, exam = divide(dataset, folds_of(dataset.name, data, 0)[fold])
    if distributed.is_initialized():
        share = Share(distributed.get_rank(), distributed.get_world_size(), agree_with_first)
        network = DistributedDataParallel(model, find_unused_parameters=has_idle_weights(model, practice))
        trained = train(model, practice, schedule, seed, network=network, share=share)
    else:
        trained = train(model, practice, schedule, seed)
    return trained, exam.grade(model, schedule.batch_size)


def has_idle_weights(model: Classifier, practice: Practice) -> bool:
    """Whether some weights get no gradient: some pools pass none to what is before them."""
    part = practice.graphs.batch(practice.train[:2])
    model.fit(part.x, part.edge_index, part.batch, len(part.y))  # training will fit it again, to all graphs
    output = model.eval()(part.x, part.edge_index, part.batch, len(part.y))
    total = output.logits.sum() + output.loss
    return None in torch.autograd.grad(total, list(model.parameters()), allow_unused=True)


def agree_with_first(values: Tensor) -> None:
    """Overwrites the values with those of the first process: rounding may differ between machines."""
    distributed.broadcast(values, src=0)


def main(
    dataset: Annotated[str, typer.Argument(help="Name of the dataset.")] = "MUTAG",
    pool: Annotated[str, typer.Option(help="Pool to train.")] = "flow",
    backbone: Annotated[str, typer.Option(help="sgc, gin or blind.")] = "gin",
    channels: Annotated[int, typer.Option(help="Node features that the pool sees.")] = 32,
    points: Annotated[int, typer.Option(help="Points per graph.")] = 5,
    fold: Annotated[int, typer.Option(help="Fold of the published splits.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Graphs per step, over all processes.")] = 32,
    max_epochs: Annotated[int, typer.Option(help="At most so many epochs.")] = 300,
    seed: Annotated[int, typer.Option(help="Seed of weights and order.")] = 0,
    data: Annotated[str | None, typer.Option(help="Folder with datasets.")] = None,
) -> None:
    """Train one model on all processes that torchrun started, and print its test accuracy."""
    if pool not in POOLS or backbone not in get_args(Backbone):
        raise typer.BadParameter(f"pool {pool!r} with backbone {backbone!r}; see flowpool evaluate --help.")
    together = "RANK" in os.environ  # set by torchrun
    if together:
        distributed.init_process_group("gloo")
    try:
        chosen: Backbone = backbone  # type: ignore[assignment]
        graphs = prepare(load_graphs(dataset, data), chosen, "normalised" if backbone == "sgc" else None)
        shape = Shape(backbone=chosen, channels=channels, num_points=points)
        model = build_model(pool, shape, graphs.num_features, graphs.num_classes, seed)
        schedule = Schedule(batch_size=batch_size, max_epochs=max_epochs)
        trained, graded = train_together(model, graphs, fold, data, schedule, seed)
        if not together or distributed.get_rank() == 0:
            weights = sum(float(w.detach().double().abs().sum()) for w in model.parameters())
            typer.echo(
                f"{dataset} fold {fold}, {pool}: accuracy {graded.accuracy:.4f}, validation loss "
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
