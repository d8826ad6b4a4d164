"""How far the compiled engine and the torch engine are apart, on all of MUTAG and 200 graphs of NCI1.

    python benchmarks/engines.py [--data DIR] [--datasets MUTAG,NCI1] [--epsilons 1,0.3,0.1]

Both solve to a Newton step of 1e-10 R in float64. Graphs whose minimiser is not isolated have a minimum-norm gradient that
rounding decides; they are counted and left out.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from flowpool import flow_pool
from flowpool.lab.speed.cases import graph_case

CASES = (("MUTAG", 8, 5, 188), ("NCI1", 64, 8, 200))


def solved(nodes: Tensor, batch: Tensor, reference: Tensor, weights: Tensor, level: float, engine: str) -> list[Tensor]:
    """Points, gradients in nodes and epsilon, and which graphs are isolated and stationary."""
    leaf = nodes.clone().requires_grad_()
    epsilon = torch.full((len(weights),), level, dtype=torch.float64, requires_grad=True)
    pooled = flow_pool(leaf, batch, reference=reference, epsilon=epsilon, engine=engine, tolerance=1e-10)  # type: ignore[arg-type]
    gradients = torch.autograd.grad((pooled.points * weights).sum(), (leaf, epsilon))
    return [pooled.points.detach(), *gradients, pooled.converged & ~pooled.backward.damped]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data")
    parser.add_argument("--epsilons", default="1,0.3,0.1")
    parser.add_argument("--datasets", default="MUTAG,NCI1")
    options = parser.parse_args()
    for name, width, num_points, count in (case for case in CASES if case[0] in options.datasets.split(",")):
        case = graph_case(name, width, num_points, count, options.data)
        generator = torch.Generator().manual_seed(0)
        reference = torch.randn(num_points, width, generator=generator, dtype=torch.float64)
        weights = torch.randn(count, num_points, width, generator=generator, dtype=torch.float64)
        for level in map(float, options.epsilons.split(",")):
            ends = [
                solved(case.nodes.double(), case.batch, reference, weights, level, e) for e in ("torch", "compiled")
            ]
            (points, to_nodes, to_epsilon, sound), (points2, to_nodes2, to_epsilon2, sound2) = ends
            gap = (points - points2).abs().amax((1, 2))
            both = sound & sound2
            same = both & (gap < 1e-3)  # otherwise the same graph in another basin
            own = same[case.batch]
            print(
                f"{name} epsilon {level}: {int(both.sum())} of {count} isolated and stationary in both, "
                f"{int(same.sum())} with the same minimiser; points differ by {float(gap[same].max()):.1e}, gradients by "
                f"{float((to_nodes - to_nodes2)[own].norm() / to_nodes[own].norm()):.1e} in nodes and "
                f"{float((to_epsilon - to_epsilon2)[same].norm() / to_epsilon[same].norm()):.1e} in epsilon (relative)",
                flush=True,
            )


if __name__ == "__main__":
    main()
