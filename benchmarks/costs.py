"""What becomes of MUTAG under every kind of ground cost: statuses, time, and gradients against finite differences.

    python benchmarks/costs.py [--graphs 16] [--wide]

Features behind a random layer, d = 8, five points, epsilon 0.1 relative. The gradient is compared along one random direction
of the nodes, on four graphs, with an isolated minimiser (OK) if there are any, with central differences; both at points that
are stationary to 1e-10. ``--wide`` times a custom cost on 32 clouds
of 30 nodes with M = 8 and D = 64.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from flowpool import Status, costs, flow_pool
from flowpool.lab.backbones import prepare
from flowpool.lab.datasets import load_dataset

STEP = 1e-6  # of the finite differences, in units of the spread of the features: |x - y|^1.5 bends sharply


def kinds(width: int) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "D^1, radius 0.1": costs.Euclidean(1.0, radius=0.1),
        "D^1.5": costs.Euclidean(1.5),
        "D^1.5, radius 0.02": costs.Euclidean(1.5, radius=0.02),
        "D^3": costs.Euclidean(3.0),
        "L1, radius 0.1": costs.Manhattan(radius=0.1),
        "cosine": costs.Cosine(),
        "Mahalanobis, rank 3": costs.Mahalanobis(width, rank=3),
        "Neural": costs.Neural(width, 16),
        "callable |x - y|^3": lambda x, y: (x - y).norm(dim=-1) ** 3,
    }


def mutag(count: int, width: int) -> tuple[Tensor, Tensor]:
    """Features of the first graphs behind a random layer, ``(N, width)``, and the graph of each node."""
    batch = prepare(load_dataset("MUTAG"), "sgc", "normalised").batch(range(count))
    weight = torch.randn(batch.x.shape[1], width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return batch.x.double() @ weight / batch.x.shape[1] ** 0.5, batch.batch


def measure(cost: Any, nodes: Tensor, batch: Tensor, reference: Tensor) -> str:
    """One row of the table."""
    leaf, began = nodes.clone().requires_grad_(), time.process_time()
    pooled = flow_pool(leaf, batch, reference=reference, cost=cost, on_failure="ignore")
    middle = time.process_time()
    cotangent = torch.randn(pooled.points.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.autograd.grad(pooled.points, leaf, cotangent)
    times = f"{middle - began:.1f} + {time.process_time() - middle:.1f} s"
    statuses = Counter(Status(code).name for code in pooled.status.tolist())
    told = ", ".join(f"{count} {name}" for name, count in statuses.items())
    causes = {pooled.cause(graph) for graph in (pooled.status != 0).nonzero().flatten().tolist()[:16]}

    isolated = (pooled.status == Status.OK).nonzero().flatten()
    chosen = (isolated if len(isolated) else torch.arange(len(pooled.status)))[:4]
    own = torch.isin(batch, chosen)
    few, graph = nodes[own].clone().requires_grad_(), torch.searchsorted(chosen, batch[own])
    way = torch.randn(few.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    size = STEP * float((nodes - nodes.mean(0)).square().sum(1).mean().sqrt())

    def ends(moved: Tensor) -> Tensor:
        options = {"reference": reference, "cost": cost, "on_failure": "ignore", "dim_size": len(chosen)}
        points = flow_pool(moved, graph, tolerance=1e-10, **options).points
        if isinstance(cost, costs.Cosine):  # which sees directions alone
            points = points / points.norm(dim=-1, keepdim=True)
        return (points * cotangent[chosen]).sum((1, 2))

    (gradient,) = torch.autograd.grad(ends(few).sum(), few)
    found = torch.zeros(len(chosen), dtype=torch.float64).index_add(0, graph, (gradient * way).sum(1))
    with torch.no_grad():
        expected = (ends(few + size * way) - ends(few - size * way)) / (2 * size)
    errors = (found - expected).abs() / expected.abs()
    compared = f"{float(errors.median()):.0e} (worst {float(errors.max()):.0e})"
    return f"{told} | {times} | {compared} | {' '.join(sorted(causes))}"


def wide(count: int = 32) -> None:
    nodes = torch.randn(30 * count, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = torch.arange(count).repeat_interleave(30)
    reference = torch.randn(8, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 8
    for name, cost in {
        "(x - y).square().sum(-1)": lambda x, y: (x - y).square().sum(-1),
        "(x - y).norm(dim=-1) ** 3": lambda x, y: (x - y).norm(dim=-1) ** 3,
        "(x - y).norm(dim=-1) ** 1.5": lambda x, y: (x - y).norm(dim=-1) ** 1.5,
    }.items():
        leaf, began = nodes.clone().requires_grad_(), time.process_time()
        pooled = flow_pool(leaf, batch, reference=reference, cost=cost)
        middle = time.process_time()
        pooled.points.square().sum().backward()
        counts = Counter(Status(code).name for code in pooled.status.tolist())
        print(f"{name}: {dict(counts)}, {middle - began:.1f} + {time.process_time() - middle:.1f} s of CPU", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=16)
    parser.add_argument("--wide", action="store_true", help="time a custom cost at M = 8, D = 64 instead")
    parser.add_argument("--only", default="", help="part of the name of the costs to look at")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if asked.wide:
        wide()
        return
    nodes, batch = mutag(asked.graphs, 8)
    reference = torch.randn(5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 8**0.5
    print("cost | statuses | CPU time forward + backward | gradient against finite differences | causes")
    for name, cost in kinds(8).items():
        if asked.only in name:
            print(f"{name} | {measure(cost, nodes, batch, reference)}", flush=True)


if __name__ == "__main__":
    main()
