"""The bench times what it says, on the batches that it names."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flowpool.lab.datasets import load_dataset
from flowpool.lab.speed import trained
from flowpool.lab.speed.bench import Measurement, write_bench
from flowpool.lab.speed.cases import Case, graph_case, large_case
from flowpool.lab.speed.device import Counter, run_on_device
from flowpool.lab.speed.peers import BASE, flow_peer, layer_peers
from flowpool.lab.speed.trained import FLOW, run_trained, trained_backbone
from flowpool.lab.speed.turns import in_turns, passes, shortest, whole

SMALL = Case("small", torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(3).repeat(4), 3, 2)


def test_passes_are_timed_apart_and_the_shortest_of_each_counts() -> None:
    """On a clock that goes forward when the work says so; the first call is no measurement."""
    now = 0.0
    forward_times, backward_times = iter([0.01, 0.05, 0.02, 0.08]), iter([0.1, 0.7, 0.6, 0.5])

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

    call = passes(lambda: Work.apply(SMALL.nodes.clone().requires_grad_()), clock=lambda: now)
    taken = in_turns({"work": call}, 3)["work"]
    assert len(taken) == 3
    assert shortest(taken) == pytest.approx((0.02, 0.5))
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


def test_trained_rows_name_every_pool_and_say_how_the_flow_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained, "SETTINGS", (("MUTAG", 4, 3), ("NCI1", 4, 3)))
    monkeypatch.setattr(trained, "EPOCHS", 1)
    rows = {row.method: row for row in run_trained(["MUTAG"], counts=(1,), rounds=1)}
    assert {FLOW, BASE, "SetTransformerAggregation", "EquilibriumAggregation", "SumAggregation"} == set(rows)
    assert {row.case for row in rows.values()} == {"MUTAG d=4 M=3"}
    assert rows[BASE].ratio == rows[BASE].median_ratio == 1.0
    for name, row in rows.items():
        assert 0 < row.median <= row.worst < 1e3 * row.epoch  # an epoch has six batches
        assert (row.stationary, row.slow_steps) == ((1.0, row.slow_steps) if name == FLOW else (None, None))
    assert rows[FLOW].slow_steps is not None


def test_features_are_of_a_network_that_has_learned_and_the_same_each_time() -> None:
    dataset = load_dataset("MUTAG", None, download=False)
    first, again, untrained = (trained_backbone(dataset, 4, epochs) for epochs in (1, 1, 0))
    part = trained.epoch_of(dataset)[0]
    outputs = [network(part.x, part.edge_index) for network in (first, again, untrained)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])


def test_work_takes_turns_and_the_first_turn_does_not_count() -> None:
    now, calls = 0.0, []
    lasting = {"a": iter([0.1, 5.0, 3.0]), "b": iter([9.0, 2.0, 4.0])}

    def work(name: str) -> None:
        nonlocal now
        calls.append(name)
        now += next(lasting[name])

    pools = {name: whole(lambda name=name: work(name), lambda: now) for name in lasting}  # type: ignore[misc]
    taken = in_turns(pools, 2)
    assert {name: shortest(own) for name, own in taken.items()} == {"a": (pytest.approx(3),), "b": (pytest.approx(2),)}
    assert calls == ["a", "b"] * 3
    once = in_turns({"c": lambda: (1.0,)}, 1, warm=False)
    assert once == {"c": [(1.0,)]}


def test_what_a_device_is_asked_for_is_counted() -> None:
    x = torch.arange(6.0, requires_grad=True)
    with Counter(torch.device("cpu")) as counter:
        (x.view(2, 3).T + 1).sum().item()  # two views, two operations, a question
    assert (counter.operations, counter.waits, counter.copies) == (3, 1, 0)
    with Counter(torch.device("cuda")) as counter:
        x.sum()
    assert counter.operations == 0


def test_counts_agree_with_those_of_a_device_that_writes_everything_down() -> None:
    """Copies and waits of both layers on the stand-in of ``tests/engines``."""
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch knows no devices written in Python")
    program = Path(__file__).parent / "programs" / "device.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["counted"]["which"] for line in lines] == 2 * ["forward", "backward"]
    for line in lines:
        seen, counted = line["seen"], line["counted"]
        assert counted["copies"] == seen["down"] + seen["up"] and counted["waits"] == seen["down"] + seen["asked"], line
    assert {line["counted"]["copies"] for line in lines if line["counted"]["method"] == "FlowPool"} == {2}


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="The device 'nothing' cannot be used here"):
        next(run_on_device("nothing"))
