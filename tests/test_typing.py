"""Types as a user meets them: a strict type checker accepts a client of the package and knows what it gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import flowpool

CLIENT = """
from typing import assert_type

import torch
from torch import Tensor

import flowpool
from flowpool import Coarsened, FlowCoarsen, FlowPool, FlowReadout, Pooled, Status, costs, flow_pool, masses, references

x, batch = torch.randn(10, 3), torch.zeros(10, dtype=torch.long)
pooled = flow_pool(x, batch, reference=references.normal(3, 2), cost=costs.Mahalanobis(3))
assert_type(pooled, Pooled)
assert_type(pooled.points, Tensor)
assert_type(pooled.plan(0), Tensor)
assert_type(Status(int(pooled.status[0])).advice, str)
pool = FlowPool(in_channels=3, num_points=2, epsilon=0.2)
assert_type(pool(x, batch), Tensor)
assert_type(pool.report.residual, Tensor)
readout = FlowReadout(in_channels=3, num_points=2)
assert_type(readout(x, batch), Tensor)
assert_type(readout.out_channels, int)
edges = torch.zeros(2, 0, dtype=torch.long)
assert_type(FlowCoarsen(in_channels=3, num_points=2)(x, edges), Coarsened)
assert_type(masses.degree(edges, num_nodes=10), Tensor)
assert_type(flowpool.__version__, str)
flow_pool("x")  # a mistake that must be found
"""


def test_a_strict_client_knows_what_it_gets(tmp_path: Path) -> None:
    sources = Path(flowpool.__file__).parents[1]
    assert (sources / "flowpool" / "py.typed").is_file()
    (tmp_path / "client.py").write_text(CLIENT)
    # Errors inside installed packages are not shown to their users; those of the sources are those of `make lint`.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary", "client.py"],
        capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(sources)},
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if "error:" in line]
    mistake = CLIENT.splitlines().index('flow_pool("x")  # a mistake that must be found') + 1
    assert lines and all(line.startswith(f"client.py:{mistake}:") for line in lines), done.stdout + done.stderr
