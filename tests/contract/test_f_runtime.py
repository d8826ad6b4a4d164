"""Section F of the contract: threads, processes, determinism, kernels, rows 40 to 48."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from contract.support import PROGRAMS, Pool, cloud, environment, index_of, radius, run, start, weighting
from hypothesis import given
from hypothesis import strategies as st

from flowpool import Status
from flowpool.core.divergence import sinkhorn_divergence


def test_row_40_the_number_of_threads_changes_no_bit(engine: str) -> None:
    assert float(run("bits.py", engine, "20", timeout=120)) == 0.0


def test_row_41_eight_python_threads_at_once(engine: str) -> None:
    assert int(run("python_threads.py", engine, "200", timeout=120)) == 0


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_row_42_data_loader_workers_pool_after_the_parent_did(engine: str, method: str) -> None:
    assert int(run("workers.py", engine, method, timeout=240)) == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_row_42_a_child_forked_while_other_threads_pool_waits_for_none_of_them(engine: str) -> None:
    assert int(run("forks.py", engine, timeout=240)) == 12


def _global_state() -> dict[str, Any]:
    threads = {name: value for name, value in os.environ.items() if "THREAD" in name}
    return {
        "threads": torch.get_num_threads(),
        "interop": torch.get_num_interop_threads(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "random": torch.get_rng_state().tolist(),
        "flush": torch.tensor(1e-310, dtype=torch.float64).item(),
        "environment": threads,
        "signal": signal.getsignal(signal.SIGINT),
    }


def test_row_43_nothing_global_is_changed(pool: Pool) -> None:
    before = _global_state()
    x = cloud(9, 2).requires_grad_()
    pool(x, index_of([5, 4])).points.sum().backward()
    assert _global_state() == before
    for wrong in ({"epsilon": -1.0}, {"masses": torch.zeros(9).double()}):
        with pytest.raises(ValueError, match="epsilon|mass"):
            pool(x, index_of([5, 4]), **wrong)
        assert _global_state() == before


@pytest.mark.parametrize("threads", [1, 3])
def test_row_43_the_number_of_threads_is_respected(engine: str, threads: int) -> None:
    made, used, after = map(int, run("threads.py", engine, str(threads)).split())
    assert after == threads
    # The compiled engine has helpers of its own beside the calling thread; torch computes with one thread.
    most = threads if engine == "compiled" else 1
    assert (made > 0) == (most > 1)
    assert made <= most - 1 and 1 <= used <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_row_44_the_engine_sees_numbers_that_are_not_finite(pool: Pool, dtype: torch.dtype, value: float) -> None:
    for place in range(5):
        x = cloud(5, 2, dtype=dtype)
        x[place, place % 2] = value
        pooled = pool(x)
        assert pooled.points.isnan().all()
        assert pooled.residual.isnan().all()
        assert pooled.status.tolist() == [Status.NONFINITE_INPUT]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("seed", range(3))
def test_row_45_every_engine_gives_the_answer_of_torch(
    pool: Pool, dtype: torch.dtype, tolerance: float, seed: int
) -> None:
    x, batch = cloud(17, 3, seed, dtype), index_of([4, 8, 5])
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    options: dict[str, Any] = {"reference": start(4, 3, dtype), "tolerance": 1e-13}
    found, expected = pool(one, batch, **options), Pool("function", "torch")(other, batch, **options)
    assert found.status.tolist() == expected.status.tolist()
    assert float((found.points - expected.points).detach().abs().max()) <= tolerance * radius(x)
    seed_of_loss = weighting(expected.points)
    (gradient,) = torch.autograd.grad((seed_of_loss * found.points).sum(), one)
    (known,) = torch.autograd.grad((seed_of_loss * expected.points).sum(), other)
    assert float((gradient - known).norm()) <= 100 * tolerance * float(known.norm())


def test_row_45_importing_compiles_nothing_and_writes_nothing() -> None:
    assert run("importing.py").split("\n")[:2] == ["none", "none"]


def test_row_46_very_many_nodes_and_sixty_four_points(engine: str) -> None:
    nodes = 200_000 if engine == "compiled" else 20_000
    finite, gap, status = run("large.py", engine, str(nodes), timeout=240).split()
    assert finite == "1"
    assert int(status) in (Status.OK, Status.SINGULAR, Status.MAX_STEPS)
    assert float(gap) < 10


def test_row_46_the_memory_of_a_large_graph_is_as_stated() -> None:
    """100,000 nodes of 16 features to 16 points, forward and backward."""
    peak, _ = map(int, run("memory_of_one.py", timeout=240).split())
    assert peak < 400_000_000


@pytest.mark.parametrize("case", ["points", "ids", "dim_size"])
def test_row_46_absurd_sizes_are_refused_with_a_message(engine: str, case: str) -> None:
    found = run("absurd.py", engine, case)
    assert found.startswith("ValueError")
    assert any(word in found for word in ("memory", "bytes", "GB", "GiB", "fit"))


@pytest.mark.timeout(120)  # against a loop without end
@pytest.mark.parametrize("epsilon", [1e-4, 1e2])
def test_row_47_a_call_is_bounded_whatever_epsilon_is(pool: Pool, epsilon: float) -> None:
    x = cloud(620, 64, seed=1)
    pooled = pool(x, num_points=4, epsilon=epsilon, max_steps=10)
    assert int(pooled.steps[0]) <= 11  # the last Newton step is taken if it is there
    assert pooled.points.isfinite().all()


@pytest.mark.parametrize("num_nodes", [5000, 20_000])
def test_row_47_an_interrupt_ends_the_call(engine: str, num_nodes: int) -> None:
    """Left alone the call would go on for hours."""
    command = [sys.executable, str(PROGRAMS / "long_call.py"), engine, str(num_nodes)]
    process = subprocess.Popen(command, env=environment(1), stdout=subprocess.PIPE, text=True)  # noqa: S603
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert process.wait(60) == 0
    finally:
        process.kill()


@given(st.integers(0, 10**6), st.integers(2, 8), st.sampled_from([0.03, 0.1, 1.0]))
def test_row_48_plans_keep_the_masses_and_divergences_behave(
    function: Pool, seed: int, num_nodes: int, epsilon: float
) -> None:
    x, masses = cloud(num_nodes, 2, seed), cloud(num_nodes, 1, seed + 1).abs().squeeze(1) + 0.05
    pooled = function(x, masses=masses, epsilon=epsilon)
    plan, scale = pooled.plan(0), radius(x) ** 2
    assert float(plan.min()) >= 0
    assert float((plan.sum(1) - 1 / 3).abs().max()) <= 1e-9
    assert float((plan.sum(0) - masses / masses.sum()).abs().max()) <= 1e-9
    assert float(pooled.divergence) >= -1e-9 * scale
    one, other = pooled.points, x.unsqueeze(0)
    forth = sinkhorn_divergence(one, other, epsilon * scale)
    back = sinkhorn_divergence(other, one, epsilon * scale)
    assert float(forth) >= -1e-9 * scale
    assert float((forth - back).abs()) <= 1e-9 * scale
    assert float(sinkhorn_divergence(other, other, epsilon * scale).abs()) <= 1e-9 * scale


@pytest.mark.parametrize(("seed", "epsilon"), [(0, 0.05), (1, 0.1), (2, 1.0)])
def test_row_48_the_flow_never_climbs(function: Pool, seed: int, epsilon: float) -> None:
    x = cloud(6, 2, seed)
    scale = radius(x) ** 2
    total = int(function(x, epsilon=epsilon, tolerance=1e-9).steps[0])
    values = torch.cat(
        [function(x, epsilon=epsilon, max_steps=cap, tolerance=1e-9).divergence for cap in range(1, total + 1)]
    )
    assert bool((values >= -1e-9 * scale).all())
    assert bool((values.diff() <= 1e-9 * scale).all())
