"""A random sweep over everything that has ever broken: crashes, statuses that promise too much, wrong gradients.

    python benchmarks/sweep.py [--graphs 20000] [--seed 0] [--oracle 0.1] [--differences 0.02]
    FLOWPOOL_CHECKED=1 python benchmarks/sweep.py
    LD_PRELOAD=libc_malloc_debug.so.0 GLIBC_TUNABLES=glibc.malloc.check=3 python benchmarks/sweep.py

The second with every access of every kernel checked, the third with the C library's own checks of the heap (up to glibc 2.33:
``MALLOC_CHECK_=3``). Each batch can be drawn again: failures name it as ``draw(seed, number)``.

Batches of one to four graphs with M from 1 to 64, D from 1 to 256, N from 1 to 2000 (log-uniform), nodes of full or low rank,
twins, near twins, lattices, large offsets, masses equal, skewed or with zeros, epsilon 1e-3 to 1e2 (relative or absolute),
float32 and float64, forward and backward with the compiled engine. Checked for

* every graph: finite points and gradients, and a status;
* a share of the graphs that are OK: the gradient of the divergence at X*, by plain Sinkhorn iterations in NumPy that share
  nothing with the engines, is as small as the residual says;
* a share of those that are isolated: the gradient in the nodes against differences of X* solved again from X*.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowpool import Status, flow_pool

Array = NDArray[np.float64]
KINDS = ("plain", "low rank", "twins", "near twins", "lattice", "offset", "few distinct", "line")


@dataclass(frozen=True)
class Case:
    """One batch."""

    nodes: Tensor
    batch: Tensor
    reference: Tensor
    masses: Tensor | None
    epsilon: float
    relative: bool
    label: str


def draw(seed: int, number: int) -> Case:
    """A random batch, the same for the same seed and number."""
    rng = np.random.default_rng([seed, number])

    def upto(most: int) -> int:
        return int(np.exp(rng.uniform(0, np.log(most + 1))))

    num_points, features = max(1, upto(64)), max(1, upto(256))
    dtype = torch.float32 if rng.random() < 0.6 else torch.float64
    kind, clouds = str(rng.choice(KINDS)), []
    for _ in range(int(rng.integers(1, 5))):
        most = 2000 if num_points * features < 256 and rng.random() < 0.1 else 120
        clouds.append(_cloud(kind, max(1, upto(most)), features, rng))
    nodes = np.concatenate(clouds)
    sizes = [len(cloud) for cloud in clouds]
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    masses, style = None, rng.random()
    if style < 0.5:
        values = np.exp(rng.uniform(0, 6, len(nodes))) if style < 0.2 else rng.uniform(0.1, 1, len(nodes))
        if style > 0.35:
            values[rng.random(len(nodes)) < 0.3] = 0
            firsts = np.cumsum([0, *sizes[:-1]])
            values[firsts] = np.maximum(values[firsts], 0.1)
            if rng.random() < 0.5:  # a node without mass may be anywhere
                nodes[values == 0] *= 10.0 ** rng.uniform(0, 6)
        masses = torch.tensor(values, dtype=dtype)
    relative = rng.random() < 0.8
    scale = 1.0 if relative else float(np.exp(rng.uniform(-1, 1)))
    reference = torch.tensor(scale * rng.standard_normal((num_points, features)) / features**0.5, dtype=dtype)
    epsilon = float(10 ** rng.uniform(-3, 2))
    label = f"draw({seed}, {number}): {kind} M={num_points} D={features} N={sizes} epsilon={epsilon:.2g}"
    label += f" {'rel' if relative else 'abs'} {dtype}"
    return Case(torch.tensor(nodes, dtype=dtype), batch, reference, masses, epsilon, relative, label)


def _cloud(kind: str, count: int, features: int, rng: np.random.Generator) -> Array:
    nodes = rng.standard_normal((count, features))
    if kind == "low rank":
        rank = int(rng.integers(1, features + 1))
        nodes = rng.standard_normal((count, rank)) @ rng.standard_normal((rank, features)) / rank**0.5
    elif kind in ("twins", "near twins", "few distinct"):
        distinct = max(1, count // 3) if kind != "few distinct" else min(count, int(rng.integers(1, 5)))
        nodes = nodes[rng.integers(0, distinct, count)]
        if kind == "near twins":
            nodes = nodes + 10.0 ** rng.uniform(-9, -2) * rng.standard_normal(nodes.shape)
    elif kind == "lattice":
        nodes = rng.integers(0, 3, (count, features)).astype(float)
    elif kind == "offset":
        nodes = nodes + 10.0 ** rng.uniform(0, 5) * rng.standard_normal(features)
    elif kind == "line":
        nodes = np.linspace(0, 1, count)[:, None] * rng.standard_normal(features)
    result: Array = nodes
    return result


def plain_gradient(points: Array, nodes: Array, masses: Array, epsilon: float) -> Array | None:
    """``2 (Q X - P Y)`` by Sinkhorn's iterations in the log domain; ``None`` where they do not get there."""
    even = np.full(len(points), 1 / len(points))
    to_nodes, to_points = _plan(points, nodes, even, masses, epsilon), _plan(points, points, even, even, epsilon)
    if to_nodes is None or to_points is None:
        return None
    gradient: Array = 2 * (to_points @ points - to_nodes @ nodes)
    return gradient


def _plan(one: Array, other: Array, rows: Array, columns: Array, epsilon: float) -> Array | None:
    cost = ((one[:, None] - other[None]) ** 2).sum(-1)
    first = np.zeros(len(one))

    def soft(values: Array, axis: int) -> Array:
        top = values.max(axis, keepdims=True)
        result: Array = np.log(np.exp(values - top).sum(axis)) + top.squeeze(axis)
        return result

    level = max(epsilon, float(cost.max()) / 4)
    for _ in range(150):
        last = level <= epsilon
        for _ in range(20):
            second = level * (np.log(columns) - soft((first[:, None] - cost) / level, 0))
            step = level * (np.log(rows) - soft((second - cost) / level, 1))
            change, first = np.abs(step - first).max(), step
        second = level * (np.log(columns) - soft((first[:, None] - cost) / level, 0))
        plan: Array = np.exp((first[:, None] + second - cost) / level)
        if last and np.abs(plan.sum(1) - rows).sum() < 1e-9:
            return plan
        if last and change == 0:
            return None
        level = max(epsilon, 0.6 * level)
    return None


def framed(case: Case, graph: int) -> tuple[Array, Array, Array, float]:
    """Nodes with mass of one graph about their mean in units of R, their masses, the mean and R."""
    own = case.batch == graph
    nodes = case.nodes[own].double().numpy()
    masses = np.ones(len(nodes)) if case.masses is None else case.masses[own].double().numpy()
    kept = masses > 0
    nodes, masses = nodes[kept], masses[kept] / masses.sum()
    mean = masses @ nodes
    radius = float(np.sqrt(masses @ ((nodes - mean) ** 2).sum(1)))
    return (nodes - mean) / (radius or 1.0), masses, mean, radius


def difference_error(case: Case, graph: int, points: Tensor, gradient: Tensor, weights: Tensor) -> float | None:
    """Relative error of the gradient along a random direction, against X* solved again from X*, in float64."""
    own = case.batch == graph
    nodes = case.nodes[own].double()
    masses = None if case.masses is None else case.masses[own].double()
    direction = torch.randn(nodes.shape, generator=torch.Generator().manual_seed(graph), dtype=torch.float64)
    share = torch.ones(len(nodes), dtype=torch.float64) if masses is None else masses
    share = share / share.sum()

    def variance(values: Tensor) -> Tensor:
        return (share[:, None] * (values - share @ values) ** 2).sum()

    radius = float(variance(nodes).sqrt())
    step = 1e-5 * radius / float(direction.norm())
    if step * float(direction.abs().max()) < 1e-11 * float(nodes.abs().max()):
        return None  # nodes so near to each other that what they are moved by is lost in rounding
    # Points that have met are told apart again, or they could not part; unless rounding forbids it.
    start = points + 1e-9 * radius * torch.randn(points.shape, generator=torch.Generator().manual_seed(1)).double()

    if len(start.unique(dim=0)) < len(start):
        return None

    def end(amount: float) -> Tensor | None:
        moved = nodes + amount * direction
        level = case.epsilon * (float(variance(moved)) if case.relative else 1.0)
        found = flow_pool(
            moved, reference=start, masses=masses, epsilon=level, relative=False, tolerance=1e-11, gradient="none"
        )
        return found.points if int(found.status[0]) == Status.OK.value else None

    ends = [end(k * step) for k in (-2, -1, 1, 2)]
    if any(value is None for value in ends):
        return None
    far, near, ahead, beyond = (value for value in ends if value is not None)
    expected = float((weights * (8 * (ahead - near) - (beyond - far)) / (12 * step)).sum())
    found = float((gradient.double() * direction).sum())
    return abs(found - expected) / (
        float(gradient.double().norm()) * float(direction.norm()) / len(nodes) ** 0.5 + 1e-300
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--oracle", type=float, default=0.1, help="share of OK graphs judged by plain Sinkhorn")
    parser.add_argument(
        "--differences", type=float, default=0.02, help="share of OK graphs differentiated by differences"
    )
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)  # of what is looked at more closely
    found: Counter[str] = Counter()
    judged, checked, flat, wrong, done, began, worst_time = 0, 0, 0, [], 0, time.process_time(), (0.0, "")
    errors: list[float] = []
    for number in itertools.count():
        if done >= options.graphs:
            break
        case = draw(options.seed, number)
        leaf = case.nodes.clone().requires_grad_()
        before = time.process_time()
        pooled = flow_pool(
            leaf, case.batch, reference=case.reference, masses=case.masses, epsilon=case.epsilon, relative=case.relative,
            engine="compiled",
        )  # fmt: skip
        weights = torch.randn(
            pooled.points.shape, generator=torch.Generator().manual_seed(done), dtype=case.nodes.dtype
        )
        (pooled.points * weights).sum().backward()
        worst_time = max(worst_time, (time.process_time() - before, case.label))
        gradient = leaf.grad
        assert gradient is not None  # noqa: S101
        for graph, code in enumerate(pooled.status.tolist()):
            status, done = Status(code), done + 1
            found[status.name] += 1
            own, points = case.batch == graph, pooled.points[graph].detach()
            if not (bool(points.isfinite().all()) and bool(gradient[own].isfinite().all())):
                wrong.append(f"not finite, {status.name}: graph {graph} of {case.label}")
            if status is not Status.OK:
                continue
            nodes, masses, mean, radius = framed(case, graph)
            several = radius > 1e-10 * np.abs(mean).max()  # otherwise the graph is one point up to rounding
            if several and rng.random() < options.oracle:
                inside = (points.double().numpy() - mean) / radius
                level = case.epsilon if case.relative else case.epsilon / radius**2
                slope = plain_gradient(inside, nodes, masses, level)
                if slope is not None:
                    judged += 1
                    # X* is handed over in the caller's precision, and placed to the tolerance of 1e-5 R.
                    noise = 4e-7 * (1 + np.abs(mean).max() / radius) if case.nodes.dtype == torch.float32 else 1e-9
                    if np.linalg.norm(slope) * len(inside) / 2 > 3e-5 + noise * len(inside) ** 0.5 * max(1, 4 / level):
                        wrong.append(f"OK, but gradient {np.linalg.norm(slope):.1e}: graph {graph} of {case.label}")
            # Where the minimiser is not isolated, X* solved again may end elsewhere in its valley.
            isolated = not bool(pooled.backward.damped[graph])
            flat += not isolated
            small = several and isolated and len(nodes) * len(points) < 4000 and points.shape[1] <= 64
            if small and case.nodes.dtype == torch.float64 and rng.random() < 5 * options.differences:
                error = difference_error(case, graph, points, gradient[own], weights[graph])
                if error is not None:
                    checked += 1
                    errors.append(error)
                    if error > 1e-2:
                        wrong.append(f"gradient off by {error:.1e}: graph {graph} of {case.label}")
    spent = time.process_time() - began
    print(f"{done} graphs, {spent:.0f} s of CPU, slowest batch {worst_time[0]:.1f} s ({worst_time[1]})")
    print("statuses: " + ", ".join(f"{name} {count} ({count / done:.2%})" for name, count in found.most_common()))
    print(f"OK, but with flat directions that only the backward pass met: {flat}")
    print(f"judged by plain Sinkhorn: {judged}; differentiated: {checked}", end="")
    if errors:
        print(
            f" (median error {np.median(errors):.1e}, 99 % below {np.quantile(errors, 0.99):.1e}, worst {max(errors):.1e})"
        )
    print(f"wrong: {len(wrong)}", *wrong[:40], sep="\n  ")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
