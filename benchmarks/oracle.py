"""Our paper mode against other people's code: OTT for the transports, jaxopt's normal equations for the backward pass.

    python benchmarks/oracle.py [--problems 30]

X^(L) of Algorithm 1 and its vector-Jacobian product, float64, S_eps and L_eps, for several lambda. Largest differences over
random problems, relative to the largest entry.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flowpool import algorithm_1
from flowpool.lab.paper.scheme import Scheme, pooled_by_ott

RIDGES = (0.0, 1e-4, 1.0, 1e6)
NUM_POINTS, NUM_NODES, DIM, EPSILON, STEP, STEPS = 4, 8, 2, 0.5, 1.0, 150


def oracle(debias: bool) -> Any:
    """``(start, nodes, masses, v, lambda) -> X, v^T dX/dY, v^T dX/db`` of a batch of problems, compiled once."""
    import jax

    jax.config.update("jax_enable_x64", True)
    scheme = Scheme(EPSILON, STEP, STEPS, debias, threshold=1e-13, max_iterations=2000, recorded=300)

    def one(start: Any, nodes: Any, masses: Any, cotangent: Any, ridge: Any) -> Any:
        points, pull = jax.vjp(pooled_by_ott(replace(scheme, ridge=ridge)), start, nodes, masses)
        return points, *pull(cotangent)[1:]

    return jax.jit(jax.vmap(one, in_axes=(0, 0, 0, 0, None)))


def problems(count: int) -> list[np.ndarray]:
    """Starts, nodes, masses and cotangents; the start is the same for all, as a reference is."""
    generator = np.random.default_rng(0)
    start = np.repeat(generator.normal(size=(1, NUM_POINTS, DIM)), count, 0)
    nodes, cotangent = (generator.normal(size=(count, size, DIM)) for size in (NUM_NODES, NUM_POINTS))
    masses = generator.uniform(0.5, 1.5, (count, NUM_NODES))
    return [start, nodes, masses / masses.sum(1, keepdims=True), cotangent]


def ours(start: Any, nodes: Any, masses: Any, cotangent: Any, debias: bool, ridge: float) -> list[np.ndarray]:
    y, b = (torch.tensor(value, requires_grad=True) for value in (nodes, masses))
    batch = torch.arange(len(nodes)).repeat_interleave(NUM_NODES)
    points = algorithm_1(
        y.flatten(0, 1), batch, start=torch.tensor(start[0]), masses=b.flatten(), epsilon=EPSILON, step_size=STEP,
        max_steps=STEPS, tolerance=1e-15, debias=debias, ridge=ridge,
    ).points  # fmt: skip
    return [x.detach().numpy() for x in (points, *torch.autograd.grad(points, (y, b), torch.tensor(cotangent)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=30)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"largest relative differences over {asked.problems} problems")
    print("energy | lambda | X | product, nodes | product, masses")
    given = problems(asked.problems)
    for debias in (True, False):
        theirs = oracle(debias)
        for ridge in RIDGES:
            expected = [np.asarray(value) for value in theirs(*given, ridge)]
            # Our masses are normalised, so that their gradient has no part along them.
            expected[2] = expected[2] - (expected[2] * given[2]).sum(1, keepdims=True)
            found = ours(*given, debias, ridge)
            worst = [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(found, expected, strict=True)]
            print(
                f"{'S_eps' if debias else 'L_eps'} | {ridge:g} | " + " | ".join(f"{v:.1e}" for v in worst), flush=True
            )


if __name__ == "__main__":
    main()
