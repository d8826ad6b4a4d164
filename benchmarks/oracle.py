"""Our paper mode against other people's code: OTT for the transports, jaxopt's normal equations for the backward pass.

    python benchmarks/oracle.py [--problems 30]

X^(L) of Algorithm 1 and its vector-Jacobian product, float64, S_eps and L_eps, for several lambda. Largest differences over
random problems, relative to the largest entry.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

from flowpool import algorithm_1
from flowpool.lab.paper_scheme import Scheme, pooled_by_ott

RIDGES = (0.0, 1e-4, 1.0, 1e6)
NUM_POINTS, NUM_NODES, DIM, EPSILON, STEP, STEPS = 4, 8, 2, 0.5, 1.0, 200


def oracle(debias: bool, ridge: float) -> Any:
    """``(start, nodes, masses, v) -> X, v^T dX/dY, v^T dX/db``, compiled once."""
    import jax

    flow = pooled_by_ott(Scheme(EPSILON, STEP, STEPS, debias, ridge, threshold=1e-13, max_iterations=5000))

    def both(start: Any, nodes: Any, masses: Any, cotangent: Any) -> Any:
        points, pull = jax.vjp(flow, start, nodes, masses)
        return points, *pull(cotangent)[1:]

    return jax.jit(both)


def compare(seed: int, debias: bool, ridge: float, theirs: Any) -> tuple[float, float, float]:
    """Relative differences in X, in the product for the nodes, and in that for their masses."""
    generator = np.random.default_rng(seed)
    nodes, start = generator.normal(size=(NUM_NODES, DIM)), generator.normal(size=(NUM_POINTS, DIM))
    cotangent, masses = generator.normal(size=(NUM_POINTS, DIM)), generator.uniform(0.5, 1.5, NUM_NODES)
    masses /= masses.sum()
    expected = [np.asarray(value) for value in theirs(start, nodes, masses, cotangent)]
    y, b = (torch.tensor(value, requires_grad=True) for value in (nodes, masses))
    points = algorithm_1(
        y, start=torch.tensor(start), masses=b, epsilon=EPSILON, step_size=STEP, max_steps=STEPS, tolerance=1e-15,
        debias=debias, ridge=ridge,
    ).points  # fmt: skip
    to_nodes, to_masses = torch.autograd.grad(points, (y, b), torch.tensor(cotangent).unsqueeze(0))
    # Masses sum to one, so that a gradient in them is meant up to a constant; ours are normalised per graph.
    expected[2] = expected[2] - (expected[2] * masses).sum()
    found = [points[0].detach().numpy(), to_nodes.numpy(), to_masses.numpy()]
    differences = [
        float(np.abs(one - other).max() / np.abs(other).max()) for one, other in zip(found, expected, strict=True)
    ]
    return differences[0], differences[1], differences[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=30)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"largest relative differences over {asked.problems} problems")
    print("energy | lambda | X | product, nodes | product, masses")
    for debias in (True, False):
        for ridge in RIDGES:
            theirs = oracle(debias, ridge)
            worst = np.max([compare(seed, debias, ridge, theirs) for seed in range(asked.problems)], 0)
            print(
                f"{'S_eps' if debias else 'L_eps'} | {ridge:g} | " + " | ".join(f"{v:.1e}" for v in worst), flush=True
            )


if __name__ == "__main__":
    main()
