"""Share of real graphs that are stationary, and that lie in the basin of the gradient flow.

    python benchmarks/fidelity.py [--engines torch,compiled] [--dataset MUTAG] [--count 188] [--time 200]

The reference is the flow itself in plain Euler steps of 1/16, followed until the gradient is below 1e-7 R or for the
time given, and polished there to a Newton step of 1e-9 R. A graph is in the right basin if no coordinate differs by
1e-3 R. Where the minimiser is not isolated, points that differ may lie in the same valley: of those that do differ it is told
how many have a divergence within 1e-8 R^2 of the fine flow's, and the share is also given without graphs that settled in one.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from flowpool import flow_pool, sinkhorn_divergence
from flowpool.core import flow
from flowpool.core.divergence import Energy
from flowpool.core.measures import make_clouds
from flowpool.costs import Geometry, SquaredEuclidean
from flowpool.lab.speed.cases import graph_case

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers import mutag_clouds  # noqa: E402

STEP = 1 / 16


def reference_flow(energy: Energy, points: Tensor, duration: float) -> tuple[Tensor, Tensor]:
    """End of the fine flow, and whether it had come to rest by itself."""
    here = energy.evaluate(points, tolerance=1e-10)
    for _ in range(int(duration / STEP)):
        resting = here.gradient.square().sum((-1, -2)).sqrt() < 1e-7
        if bool(resting.all()):
            break
        move = -STEP * here.gradient / energy.scales.stiffness.unsqueeze(-1)
        here = energy.evaluate(
            torch.where(resting[:, None, None], here.points, here.points + move), here.transport.potential, 1e-10
        )
    resting = here.gradient.square().sum((-1, -2)).sqrt() < 1e-7
    return flow.follow(energy, here.points, 1e-9, 3000).points, resting


def divergence(points: Tensor, nodes: Tensor, epsilon: float) -> float:
    """S_eps of one graph in its frame."""
    return float(sinkhorn_divergence(points[None], nodes[None], epsilon))


def clouds_of(dataset: str, width: int, count: int, num_points: int) -> tuple[Tensor, Tensor]:
    """Node features, ``(N, D)`` in float64, and the graph of each node."""
    if dataset == "MUTAG":
        return mutag_clouds(width=width or None, count=count)
    case = graph_case(dataset, width, num_points, count)
    return case.nodes.double(), case.batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", default="torch,compiled")
    parser.add_argument("--dataset", default="MUTAG")
    parser.add_argument("--count", type=int, default=188)
    parser.add_argument("--points", type=int, default=5)
    parser.add_argument("--width", type=int, default=8, help="channels; 0 for the bare labels of MUTAG")
    parser.add_argument("--time", type=float, default=200.0)
    parser.add_argument("--epsilons", default="1,0.3,0.1")
    options = parser.parse_args()
    num_points = options.points
    features, batch = clouds_of(options.dataset, options.width, options.count, num_points)
    dim = features.shape[1]
    reference = torch.randn(num_points, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    clouds, _ = make_clouds(features, batch)
    centred = clouds.nodes - clouds.mean()[clouds.batch]
    radius = clouds.sum(clouds.masses * centred.square().sum(-1)).sqrt()
    framed = clouds.moved(centred / radius[clouds.batch, None])
    uniform = torch.full((num_points,), 1 / num_points, dtype=torch.float64)
    start = reference.expand(options.count, num_points, dim)
    print(f"{options.dataset}, {options.count} graphs, d={dim}, M={num_points}, reference N(0, 1)")
    for level in map(float, options.epsilons.split(",")):
        fine, rested = torch.zeros_like(start), torch.zeros_like(radius, dtype=torch.bool)
        for graphs in framed.groups(torch.arange(options.count), num_points * dim):
            shares = uniform.expand(len(graphs), num_points)
            energy = Energy(
                Geometry(SquaredEuclidean()), *framed.padded(graphs), shares, torch.full((len(graphs),), level).double()
            )
            fine[graphs], rested[graphs] = reference_flow(energy, start[graphs], options.time)
        print(f"epsilon {level}: fine flow at rest by itself for {rested.double().mean():.0%}", flush=True)
        for engine in options.engines.split(","):
            began = time.process_time()
            pooled = flow_pool(features, batch, reference=reference, epsilon=level, engine=engine)
            spent = time.process_time() - began
            ours = (pooled.points - clouds.mean()[:, None]) / radius[:, None, None]
            same = (fine - ours).abs().amax((1, 2)) < 1e-3
            level_with = sum(
                abs(
                    divergence(fine[graph], framed.nodes[clouds.batch == graph], level)
                    - divergence(ours[graph], framed.nodes[clouds.batch == graph], level)
                )
                < 1e-8
                for graph in (~same).nonzero().flatten().tolist()
            )
            print(
                f"  {engine}: stationary {pooled.converged.double().mean():.1%} "
                f"(largest Newton step {pooled.residual.max():.1e} R), same basin {same.double().mean():.1%} "
                f"({same[~pooled.settled].double().mean():.1%} of the {int((~pooled.settled).sum())} that did not settle in a "
                f"valley; {level_with} of the {int((~same).sum())} others are as near to the nodes), "
                f"steps mean {pooled.steps.double().mean():.0f} max {int(pooled.steps.max())}, {spent:.2f} s of CPU",
                flush=True,
            )


if __name__ == "__main__":
    main()
