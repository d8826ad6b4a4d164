"""Readouts that share the statistics of BatchNorm between processes, on the CPU.

Run as a script, this file is one process of the distributed step that the test starts.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flowpool import FlowReadout

RANKS = 2
SIZES = ([3, 9, 1, 6], [7, 2, 5, 4])  # nodes of the graphs of each process


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.readout = FlowReadout(2, 3).double()
        self.head = nn.Linear(self.readout.out_channels, 1).double()

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return self.head(self.readout(x, index))


def share(ranks: list[int]) -> tuple[Tensor, Tensor]:
    """Nodes and graph ids of some processes; those of the second are elsewhere and wider."""
    sizes, nodes = [], []
    for rank in ranks:
        generator = torch.Generator().manual_seed(rank)
        drawn = torch.randn(sum(SIZES[rank]), 2, generator=generator, dtype=torch.float64)
        nodes.append((1 + rank) * drawn + 2 * rank)
        sizes += SIZES[rank]
    return torch.cat(nodes), torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def train(model: nn.Module, ranks: list[int]) -> dict[str, Tensor]:
    """Two steps of training; gradients of the second, and the state afterwards."""
    nodes, index = share(ranks)
    for _ in range(2):
        model.zero_grad()
        model(nodes, index).square().mean().backward()
    layer = model.module if isinstance(model, DistributedDataParallel) else model
    gradients = {f"gradient of {name}": value.grad for name, value in layer.named_parameters()}
    return gradients | layer.state_dict()


def run_rank(way: str, rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", f"file://{folder / 'meeting'}", rank=rank, world_size=RANKS)
    model: nn.Module = Model()
    if way == "shared":
        model.readout.share_statistics()
        found = train(DistributedDataParallel(model), [rank])
    else:  # which torch refuses to wrap on the CPU: gradients are averaged by hand
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        assert isinstance(model.readout.node_norm, nn.SyncBatchNorm)
        found = train(model, [rank])
        for name, value in found.items():
            if name.startswith("gradient"):
                dist.all_reduce(value.div_(RANKS))
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("way", ["converted", "shared"])
def test_readouts_of_two_processes_are_one_on_the_joined_batch(way: str, tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path), way]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(RANKS)]
    try:
        assert [rank.wait(timeout=250) for rank in ranks] == [0] * RANKS
    finally:
        for rank in ranks:
            rank.kill()
    joined = train(Model(), [0, 1])
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found.keys() == joined.keys()
        for name, value in joined.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-9, msg=name)


if __name__ == "__main__":
    run_rank(sys.argv[2], int(sys.argv[3]), Path(sys.argv[1]))
