"""Pools random graphs of all kinds with the compiled engine, forward and backward; writes what was found.

Prints the way the kernels were compiled, and the number of graphs.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from flowpool import flow_pool
from flowpool.kernels.machine.jit import CHECKED, QUICK

CALLS = 40


def graphs(rng: np.random.Generator, features: int) -> list[np.ndarray]:
    """A few clouds: of full or low rank, with twins or near-twins, on lattices, far from the origin."""
    found = []
    for _ in range(int(rng.integers(3, 9))):
        size, kind = int(10 ** rng.uniform(0.3, 2.2)), rng.integers(5)
        nodes = rng.standard_normal((size, features))
        if kind == 1:
            rank = int(rng.integers(1, features + 1))
            nodes = nodes[:, :rank] @ rng.standard_normal((rank, features))
        elif kind == 2:
            nodes = nodes[rng.integers(max(1, size // 3), size=size)] + 1e-9 * rng.integers(2) * nodes
        elif kind == 3:
            nodes = rng.integers(0, 3, (size, features)).astype(float)
        elif kind == 4:
            nodes = nodes + 10 ** rng.uniform(0, 5)
        found.append(nodes)
    return found


def main() -> None:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    found: dict[str, list[Any]] = {"points": [], "nodes": [], "masses": [], "status": []}
    for call in range(CALLS):
        count = int(rng.choice([1, 2, 3, 5, 8, 13, 20, 33]))
        features = int(rng.choice([1, 2, 3, 6, 9, 17, 33] if count < 20 else [1, 2, 3, 6, 17]))
        clouds = graphs(rng, features)
        dtype = torch.float32 if call % 3 == 0 else torch.float64
        x = torch.from_numpy(np.concatenate(clouds)).to(dtype).requires_grad_()
        batch = torch.arange(len(clouds)).repeat_interleave(torch.tensor([len(nodes) for nodes in clouds]))
        masses = torch.from_numpy(rng.uniform(0.1, 1.0, len(batch)) * (rng.random(len(batch)) < 0.9)).to(dtype)
        masses[batch.diff(prepend=torch.tensor([-1])) > 0] = 1.0  # no graph without any
        masses.requires_grad_()
        reference = torch.from_numpy(rng.standard_normal((count, features))).to(dtype)
        shares = torch.from_numpy(rng.uniform(0.5, 1.5, count)).to(dtype) if call % 4 == 0 else None
        level = float(10 ** rng.uniform(-1.5, 1))
        pooled = flow_pool(
            x, batch, reference=reference, masses=masses, point_masses=shares, epsilon=level, engine="compiled",
            max_steps=80,
        )  # fmt: skip
        weights = torch.from_numpy(rng.standard_normal(pooled.points.shape)).to(dtype)
        gradients = torch.autograd.grad((pooled.points * weights).sum(), (x, masses))
        values = (pooled.points.detach(), *gradients, pooled.status)
        for name, value in zip(found, values, strict=True):
            found[name].append(value.double().numpy().ravel())
    np.savez(sys.argv[1], **{name: np.concatenate(values) for name, values in found.items()})
    print("checked" if CHECKED else "quick" if QUICK else "plain", len(np.concatenate(found["status"])))


if __name__ == "__main__":
    main()
