"""The bench times what it says, on the batches that it names."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from flowpool.lab.speed import bench
from flowpool.lab.speed.bench import Measurement, best_times, write_bench
from flowpool.lab.speed.cases import Case, graph_case, large_case
from flowpool.lab.speed.peers import BASE, flow_peer, layer_peers

SMALL = Case("small", torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(3).repeat(4), 3, 2)


def test_the_shortest_of_several_runs_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes forward when the work says so."""
    now = 0.0
    forward_times, backward_times = iter([0.05, 0.02, 0.08]), iter([0.7, 0.6, 0.5])

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds

    class Work(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, nodes: torch.Tensor) -> torch.Tensor:
            work(next(forward_times))
            return nodes * 2

        @staticmethod
        def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
            work(next(backward_times))
            return upstream * 2

    monkeypatch.setattr(bench.time, "perf_counter", lambda: now)
    assert best_times(Work.apply, SMALL, seconds=0.0, least=3) == pytest.approx((20, 500))
    assert next(forward_times, None) is None


def test_cases_have_the_sizes_they_name() -> None:
    mutag = graph_case("MUTAG", 8, 5)
    assert (mutag.width, mutag.num_graphs, mutag.num_points) == (8, 32, 5)
    assert mutag.batch.unique().numel() == 32
    cloud = large_case(1000)
    assert cloud.nodes.shape == (1000, 16)
    assert cloud.num_graphs == 1


def test_all_peers_pool_the_same_batch() -> None:
    case = Case("sorted", SMALL.nodes, SMALL.batch.sort().values, 3, 2)
    peers = layer_peers(case)
    assert BASE in peers
    for pool in [*peers.values(), flow_peer(case, "torch", 0.3)]:
        output = pool(case.nodes)
        assert output.shape[0] == 3
        assert bool(output.isfinite().all())


def test_table_and_picture_are_written(tmp_path: Path) -> None:
    rows = [
        Measurement("MUTAG", "flow, compiled", 0.1, 4.0, 1.0, 2.5, 1.0, 3.0),
        Measurement("MUTAG", BASE, None, 1.0, 1.0, 1.0, None, None),
    ]
    table, picture = write_bench(rows, tmp_path / "new")
    with table.open() as file:
        found = list(csv.DictReader(file))
    assert [row["method"] for row in found] == ["flow, compiled", BASE]
    assert float(found[0]["ratio"]) == pytest.approx(2.5)
    assert picture.stat().st_size > 1000
