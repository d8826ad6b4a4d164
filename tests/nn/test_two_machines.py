"""The documented recipe for two machines, tried with two agents of torchrun that meet over the loopback address.

Run as a script, this file is what each of them starts.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import flowpool
from flowpool import FlowPool, FlowReadout

MACHINES, GRAPHS, WIDTH = 2, 8, 4


class Model(nn.Module):
    """Both readouts behind a linear layer. Statistics of BatchNorm are fixed: each process would take its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.pool, self.readout = FlowPool(WIDTH, 3), FlowReadout(WIDTH, 3)
        self.head = nn.Linear(self.pool.out_channels + self.readout.out_channels, 2)
        self.readout.eval()

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        nodes = torch.tanh(self.first(x))
        return self.head(torch.cat([self.pool(nodes, batch), self.readout(nodes, batch)], 1))


def share(rank: int, machines: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every graph that falls to one of the machines: nodes, graph of each, class of each graph."""
    generator = torch.Generator().manual_seed(0)
    graphs = [torch.randn(6 + k, WIDTH, generator=generator) for k in range(GRAPHS)][rank::machines]
    sizes = torch.tensor([len(graph) for graph in graphs])
    return torch.cat(graphs), torch.arange(len(graphs)).repeat_interleave(sizes), (sizes // 3) % 2


def gradient(model: nn.Module, rank: int, machines: int) -> Tensor:
    x, batch, labels = share(rank, machines)
    nn.functional.cross_entropy(model(x, batch), labels).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def run_rank(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.save(gradient(DistributedDataParallel(Model()), rank, dist.get_world_size()), folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_machines_have_the_gradient_of_one_on_the_joined_batch(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    recipe = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", str(MACHINES), "--nproc-per-node", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", __file__, str(tmp_path),
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(Path(flowpool.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    agents = [subprocess.Popen(recipe, env=environment, stderr=subprocess.DEVNULL) for _ in range(MACHINES)]
    try:
        assert [agent.wait(timeout=250) for agent in agents] == [0] * MACHINES
    finally:
        for agent in agents:
            agent.kill()
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(MACHINES)]
    assert torch.equal(*found)
    expected = gradient(Model(), 0, 1)
    assert float(expected.abs().max()) > 1e-2
    assert float((found[0] - expected).abs().max()) < 1e-6


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
