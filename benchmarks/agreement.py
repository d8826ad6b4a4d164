"""How far flowpool is from other people's code and from finite differences; the table of docs/paper.md.

    python benchmarks/agreement.py [--write docs/paper.md]

Worst cases over random problems in float64; nothing is asserted here, the tests do that.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowpool import Status, algorithm_1, flow_pool, sinkhorn_divergence, wasserstein
from flowpool.core.divergence import sinkhorn_loss
from flowpool.lab.paper.scheme import Scheme, pooled_by_ott

TIGHT = {"tolerance": 1e-12, "max_steps": 3000}
PAIRS = 50
RIDGES = (0.0, 1e-4, 1.0)
NUM_POINTS, NUM_NODES, DIM, EPSILON, STEP, STEPS = 4, 8, 2, 0.5, 1.0, 150
PROBLEMS = 30
BEGIN, END = "<!-- agreement: written by benchmarks/agreement.py -->", "<!-- end of agreement -->"


def pairs() -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Clouds of five and nine nodes, and their masses."""
    for seed in range(PAIRS):
        yield cloud(seed, 5, 3)[0], cloud(seed + 1000, 9, 3)[0], masses(seed, 5), masses(seed + 1, 9)


def against_ott() -> float:
    """Largest difference of S_eps."""
    import jax
    import jax.numpy as jnp
    from ott.geometry import pointcloud
    from ott.tools.sinkhorn_divergence import sinkhorn_divergence as ott_divergence

    jax.config.update("jax_enable_x64", True)
    settings = {"threshold": 1e-14, "max_iterations": 50_000}

    @jax.jit
    def divergence(x: Any, y: Any, a: Any, b: Any) -> Any:
        return ott_divergence(pointcloud.PointCloud, x, y, a=a, b=b, epsilon=EPSILON, solve_kwargs=settings)[0]

    worst = 0.0
    for x, y, a, b in pairs():
        theirs = divergence(*(jnp.asarray(value.numpy()) for value in (x, y, a, b)))
        ours = sinkhorn_divergence(x[None], y[None], EPSILON, a[None], b[None])
        worst = max(worst, abs(float(theirs) - float(ours)))
    return worst


def against_pot() -> tuple[float, float]:
    """Largest differences of the entropic plan's cost and of exact W_2."""
    import ot

    entropic = exact = 0.0
    for x, y, a, b in pairs():
        cost = torch.cdist(x, y).square()
        plan = ot.sinkhorn(
            a.numpy(), b.numpy(), cost.numpy(), EPSILON, "sinkhorn_log", numItermax=100_000, stopThr=1e-14
        )
        theirs = float((plan * cost.numpy()).sum() + EPSILON * (plan * np.log(plan)).sum())  # eq. 5, H = -sum P log P
        ours = sinkhorn_loss(x[None], y[None], EPSILON, a[None], b[None])
        entropic = max(entropic, abs(theirs - float(ours)))
        exact = max(
            exact, abs(float(np.sqrt(ot.emd2(a.numpy(), b.numpy(), cost.numpy()))) - float(wasserstein(x, y, b, a)))
        )
    return entropic, exact


def cloud(seed: int, size: int, dim: int) -> tuple[Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, dim, generator=generator, dtype=torch.float64), generator


def masses(seed: int, size: int) -> Tensor:
    weights = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.2
    return weights / weights.sum()


def gradient_gaps() -> Iterator[tuple[str, str, int, float]]:
    """Worst relative differences of the gradient in nodes and masses: of each engine, against the two other ways."""
    gaps: dict[tuple[str, str], list[float]] = {}
    for seed in range(20):
        nodes, generator = cloud(seed, 8, 2)
        reference = torch.randn(3, 2, generator=generator, dtype=torch.float64)
        given: dict[str, Any] = {"reference": reference, "epsilon": (0.3, 0.5, 1.0)[seed % 3], "on_failure": "ignore"}
        cotangent = torch.randn(1, 3, 2, generator=generator, dtype=torch.float64)
        inputs = [nodes.requires_grad_(), masses(seed, 8).requires_grad_()]
        directions = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in inputs]
        unrolled = {"gradient": "unrolled", "tolerance": 1e-12, "max_steps": 3000}
        slow = flow_pool(nodes, masses=inputs[1], **unrolled, **given)
        if int(slow.status[0]) != Status.OK:  # not isolated, or too flat to be unrolled
            continue
        by_steps = torch.autograd.grad((slow.points * cotangent).sum(), inputs)
        for engine in ("torch", "compiled"):
            options = {**given, **TIGHT, "engine": engine}
            points = flow_pool(nodes, masses=inputs[1], **options).points
            implicit = torch.autograd.grad((points * cotangent).sum(), inputs)
            for place, (one, other, direction) in enumerate(zip(implicit, by_steps, directions, strict=True)):
                slope = _slope(inputs, place, direction, cotangent, options)
                scale = max(abs(slope), float(one.norm()))
                found = gaps.setdefault((engine, "unrolled (section 8.1)"), [])
                found.append(float((one - other).norm() / one.norm()))
                found = gaps.setdefault((engine, "finite differences"), [])
                found.append(abs(float((one * direction).sum()) - slope) / scale)
    for (engine, way), found in gaps.items():
        yield engine, way, len(found) // 2, max(found)


def _slope(inputs: list[Tensor], place: int, direction: Tensor, cotangent: Tensor, options: Any) -> float:
    """The derivative along a direction by central differences of fourth order."""

    def value(step: float) -> float:
        moved = [x.detach() + step * direction if k == place else x.detach() for k, x in enumerate(inputs)]
        return float((flow_pool(moved[0], masses=moved[1], **options).points * cotangent).sum())

    h = 2e-4
    return (8 * (value(h) - value(-h)) - (value(2 * h) - value(-2 * h))) / (12 * h)


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


def scheme_gaps(debias: bool, ridge: float) -> list[float]:
    """Algorithm 1 and its products, relative to the largest entry."""
    given = problems(PROBLEMS)
    expected = [np.asarray(value) for value in oracle(debias)(*given, ridge)]
    # Our masses are normalised, so that their gradient has no part along them.
    expected[2] = expected[2] - (expected[2] * given[2]).sum(1, keepdims=True)
    found = ours(*given, debias, ridge)
    return [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, expected, strict=True)]


def rows() -> Iterator[tuple[str, str, str, float]]:
    """What, against what, over which problems, and the largest difference."""
    entropic, exact = against_pot()
    yield "entropic transport, eq. 5", "POT", f"{PAIRS} pairs", entropic
    yield "W_2, eq. 4", "POT", f"{PAIRS} pairs", exact
    yield "S_eps, eq. 11", "OTT", f"{PAIRS} pairs", against_ott()
    for debias in (True, False):
        name = "S_eps" if debias else "L_eps"
        gaps = [scheme_gaps(debias, ridge) for ridge in RIDGES]
        listed = ", ".join(f"{ridge:g}" for ridge in RIDGES)
        yield (
            f"points of Algorithm 1 on {name}",
            "OTT's transports",
            f"{PROBLEMS}, {STEPS} steps",
            max(g[0] for g in gaps),
        )
        for place, what in ((1, "nodes"), (2, "masses")):
            which = f"{PROBLEMS}, lambda {listed}"
            yield f"its gradient in {what}, eqs. 36 to 42", "jaxopt on OTT", which, max(gap[place] for gap in gaps)
    for engine, way, used, worst in gradient_gaps():
        yield f"gradient of X\\* in nodes and masses, {engine} engine", way, f"{used}", worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="page to write the table into")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["| what | against | problems | largest difference |", "|---|---|---|---|"]
    for line in lines:
        print(line)
    for what, other, which, worst in rows():
        lines.append(f"| {what} | {other} | {which} | {worst:.1e} |")
        print(lines[-1], flush=True)
    if asked.write:
        before, _, rest = asked.write.read_text(encoding="utf-8").partition(BEGIN)
        table = "\n".join(lines)
        asked.write.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
