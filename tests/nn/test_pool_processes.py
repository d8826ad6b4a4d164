"""The layer across processes: distributed training, pickling, and import without PyTorch Geometric.

Run as a script, this file is one process of the distributed training that the first test starts.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flowpool.lab.datasets import GraphBatch, load_dataset
from flowpool.nn.pool import FlowPool

EPOCHS, RANKS = 20, 2


class Model(nn.Module):
    """A small classifier of MUTAG: two rounds of message passing, the pool, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.rounds = nn.ModuleList([nn.Linear(7, 4), nn.Linear(4, 4)])
        self.pool = FlowPool(4, 3)
        self.head = nn.Linear(self.pool.out_channels, 2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        for linear in self.rounds:
            x = torch.tanh(linear(x + torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])))
        return self.head(self.pool(x, batch))


def share(rank: int, ranks: int) -> GraphBatch:
    """The graphs of one process."""
    dataset = load_dataset("MUTAG")
    small = [number for number, graph in enumerate(dataset) if 13 <= len(graph.x) <= 16][:12]
    return dataset.batch(small[rank::ranks])


def differentiate(model: nn.Module, batch: GraphBatch) -> Tensor:
    """Gradient of the loss in all parameters, in a row; left in the model too."""
    model.zero_grad()
    nn.functional.cross_entropy(model(batch.x, batch.edge_index, batch.batch), batch.y).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def run_rank(rank: int, folder: Path) -> None:
    """One process of the training. The wrapped model is gone before the group is: one that outlives it can hang with gloo."""
    dist.init_process_group("gloo", f"file://{folder / 'meeting'}", rank=rank, world_size=RANKS)
    torch.save(train(DistributedDataParallel(Model()), share(rank, RANKS)), folder / f"{rank}.pt")
    dist.destroy_process_group()


def train(model: nn.Module, batch: GraphBatch) -> dict[str, Tensor]:
    """The weights before every epoch, and the gradient in it."""
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    weights, gradients = [], []
    for _ in range(EPOCHS):
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        gradients.append(differentiate(model, batch))
        optimiser.step()
    return {"weights": torch.stack(weights), "gradients": torch.stack(gradients)}


def test_two_distributed_processes_have_the_gradients_of_one_on_the_joined_batch(tmp_path: Path) -> None:
    ranks = [subprocess.Popen([sys.executable, __file__, str(tmp_path), str(rank)]) for rank in range(RANKS)]
    try:
        assert [rank.wait(timeout=250) for rank in ranks] == [0] * RANKS
    finally:
        for rank in ranks:
            rank.kill()
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(RANKS))
    assert torch.equal(first["gradients"], second["gradients"])
    assert float(first["weights"].diff(dim=0).abs().amax(1).min()) > 1e-3  # it was trained in every epoch
    model, joined = Model(), share(0, 1)
    for weights, gradient in zip(first["weights"], first["gradients"], strict=True):
        nn.utils.vector_to_parameters(weights, model.parameters())
        assert float((differentiate(model, joined) - gradient).abs().max()) < 1e-6


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_pickled_layer_gives_the_same_bits_in_another_process(method: str) -> None:
    layer = FlowPool(2, 3, epsilon=0.2, size="append", reference=torch.randn(3, 2))
    x, index = torch.randn(9, 2), torch.tensor([0, 0, 0, 0, 2, 2, 2, 2, 2])
    here = layer(x, index)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        there = pool.submit(layer, x, index).result(timeout=60)
    assert torch.equal(here, there)


def test_saved_states_give_the_same_bits_in_another_process(tmp_path: Path) -> None:
    layer = FlowPool(2, 3, reference=torch.randn(3, 2))
    x = torch.randn(9, 2)
    torch.save({"state": layer.state_dict(), "x": x, "out": layer(x)}, tmp_path / "saved.pt")
    program = (
        "import sys, torch; from flowpool.nn.pool import FlowPool; saved = torch.load(sys.argv[1], weights_only=True);"
        "layer = FlowPool(2, 3, seed=5); assert not torch.equal(layer(saved['x']), saved['out']);"
        "print(layer.load_state_dict(saved['state'])); print(torch.equal(layer(saved['x']), saved['out']))"
    )
    assert _python(program, str(tmp_path / "saved.pt")).split("\n")[:2] == ["<All keys matched successfully>", "True"]


def test_the_layer_is_imported_when_it_is_asked_for() -> None:
    program = (
        "import sys, flowpool; print('torch_geometric' in sys.modules); from flowpool import FlowPool;"
        "print(FlowPool(8, 5).out_channels, 'torch_geometric' in sys.modules)"
    )
    assert _python(program).split("\n")[:2] == ["False", "40 True"]


def test_without_pytorch_geometric_only_the_layer_is_missing() -> None:
    program = (
        "import sys; sys.modules['torch_geometric'] = None\n"
        "import torch, flowpool\n"
        "x = torch.randn(5, 2)\n"
        "print(flowpool.flow_pool(x, reference=torch.zeros(1, 2)).points[0, 0].allclose(x.mean(0), atol=1e-5))\n"
        "try: from flowpool import FlowPool\n"
        "except ImportError as error: print(error)\n"
        "from flowpool import *\n"
        "print(transport_pool is flowpool.transport_pool, 'FlowPool' in globals())\n"
    )
    found = _python(program).split("\n")
    assert found[0] == "True"
    assert "pip install 'flowpool[pyg]'" in found[1]
    assert found[2] == "True False"


def _python(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


if __name__ == "__main__":
    run_rank(int(sys.argv[2]), Path(sys.argv[1]))
