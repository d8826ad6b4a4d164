"""Several processes train the model that one process trains."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

from flowpool.lab.configuration import Configuration
from flowpool.lab.distributed import evaluate_together
from flowpool.lab.options import Schedule, Shape

# 152 training graphs in mini-batches of 31: the last one has 28; halves of 31 are unequal.
CONFIGURATION = Configuration(shape=Shape(propagation="raw"), schedule=Schedule(max_epochs=3, batch_size=31))


def trained_weights(pool: str) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    model, trained, run = evaluate_together(CONFIGURATION, pool, 0)
    assert len(trained.curve.train_loss) == 3 and len(run.predictions) == 19
    return model.state_dict()


def _train_in_child(rank: int, processes: int, folder: str) -> None:
    store = distributed.FileStore(f"{folder}/store", processes)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    try:
        for pool in ("sort", "wegl"):  # wegl passes no gradient to the backbone
            torch.save(trained_weights(pool), f"{folder}/{pool}-{rank}.pt")
    finally:
        distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("group")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flowpool.lab.distributed"])
    children = [context.Process(target=_train_in_child, args=(rank, 2, str(folder))) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
        assert child.exitcode == 0
    return folder


@pytest.mark.parametrize("pool", ["sort", "wegl"])
def test_two_processes_equal_one_on_the_joined_batch(folder: Path, pool: str) -> None:
    first, second = (torch.load(folder / f"{pool}-{rank}.pt", weights_only=True) for rank in range(2))
    alone = trained_weights(pool)
    for name, weight in alone.items():
        assert torch.equal(first[name], second[name])
        # Sums in another order; Adam divides by roots of squared gradients, which magnifies rounding.
        torch.testing.assert_close(first[name], weight, rtol=1e-4, atol=1e-4)
