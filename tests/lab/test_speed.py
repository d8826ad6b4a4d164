"""The bench times what it says, on the batches that it names."""

import csv
import time
from pathlib import Path

import pytest
import torch

from flowpool.lab.speed.bench import Measurement, best_times, write_bench
from flowpool.lab.speed.cases import Case, graph_case, large_case
from flowpool.lab.speed.peers import BASE, flow_peer, layer_peers

SMALL = Case("small", torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(3).repeat(4), 3, 2)


def test_the_shorter_of_several_runs_counts() -> None:
    pauses = [0.05, 0.02, 0.08]
    left = iter(pauses)

    def pool(nodes: torch.Tensor) -> torch.Tensor:
        time.sleep(next(left))
        return nodes * 2

    forward, backward = best_times(pool, SMALL, seconds=0.0, least=3)
    assert 20 <= forward < 50
    assert backward < 20
    assert next(left, None) is None


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
