"""The numbers behind the promises: oracles, gradients three ways, invariances, memory.

    python benchmarks/correctness.py

Worst cases over random problems; nothing is asserted here, the tests do that.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from flowpool import flow_pool
from flowpool.core.divergence import make_energy, sinkhorn_divergence
from flowpool.core.hessian import hessian
from flowpool.lab.paper.memory import TensorMemory

TIGHT = {"tolerance": 1e-12, "max_steps": 3000}


def against_ott(count: int = 50) -> float:
    """Largest difference of S_eps to OTT's over random pairs with random masses."""
    import jax
    import jax.numpy as jnp
    from ott.geometry import pointcloud
    from ott.tools.sinkhorn_divergence import sinkhorn_divergence as ott_divergence

    jax.config.update("jax_enable_x64", True)
    worst = 0.0
    for seed in range(count):
        x, y, a, b = cloud(seed, 5, 3)[0], cloud(seed + 1000, 9, 3)[0], masses(seed, 5), masses(seed + 1, 9)
        settings = {"threshold": 1e-14, "max_iterations": 50_000}
        arrays = (jnp.asarray(v.numpy()) for v in (x, y))
        theirs, _ = ott_divergence(
            pointcloud.PointCloud,
            *arrays,
            a=jnp.asarray(a.numpy()),
            b=jnp.asarray(b.numpy()),
            epsilon=0.5,
            solve_kwargs=settings,
        )
        ours = sinkhorn_divergence(x[None], y[None], 0.5, a[None], b[None])
        worst = max(worst, abs(float(theirs) - float(ours)))
    return worst


def cloud(seed: int, size: int, dim: int) -> tuple[Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, dim, generator=generator, dtype=torch.float64), generator


def masses(seed: int, size: int) -> Tensor:
    weights = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.2
    return weights / weights.sum()


def condition(points: Tensor, nodes: Tensor, weights: Tensor, epsilon: float) -> float:
    """Condition number of the Hessian at the pooled points."""
    mean = (weights[:, None] * nodes).sum(0)
    variance = float((weights * (nodes - mean).square().sum(-1)).sum())
    energy = make_energy(points, nodes[None], epsilon * variance, masses=weights[None])
    values = torch.linalg.eigvalsh(hessian(energy, energy.evaluate(points)).matrix[0])
    return float(values[-1] / values[0]) if values[0] > 0 else float("inf")


def three_ways(engine: str, count: int = 20) -> tuple[float, float, int]:
    """Worst relative difference implicit-unrolled and implicit-finite differences, and how many problems qualified."""
    unrolled_gap = difference_gap = 0.0
    used = 0
    for seed in range(count):
        nodes, generator = cloud(seed, 8, 2)
        reference = torch.randn(3, 2, generator=generator, dtype=torch.float64)
        weights = masses(seed, 8)
        epsilon = (0.3, 0.5, 1.0)[seed % 3]
        cotangent = torch.randn(1, 3, 2, generator=generator, dtype=torch.float64)
        inputs = [nodes.requires_grad_(), weights.requires_grad_()]
        pooled = flow_pool(nodes, reference=reference, masses=weights, epsilon=epsilon, engine=engine, **TIGHT)
        if (
            not bool(pooled.converged)
            or condition(pooled.points.detach(), nodes.detach(), weights.detach(), epsilon) > 1e6
        ):
            continue
        implicit = torch.autograd.grad((pooled.points * cotangent).sum(), inputs)
        slow = flow_pool(
            nodes,
            reference=reference,
            masses=weights,
            epsilon=epsilon,
            gradient="unrolled",
            tolerance=1e-13,
            max_steps=20_000,
        )
        unrolled = torch.autograd.grad((slow.points * cotangent).sum(), inputs)
        used += 1
        for place, (one, other) in enumerate(zip(implicit, unrolled, strict=True)):
            unrolled_gap = max(unrolled_gap, float((one - other).norm() / one.norm()))
            # Central differences from the solution itself, so that no other minimum can be chosen.
            direction = torch.randn(one.shape, generator=generator, dtype=torch.float64)

            def value(step: float, place: int = place, direction: Tensor = direction) -> float:
                moved = [x.detach() + step * direction if k == place else x.detach() for k, x in enumerate(inputs)]
                found = flow_pool(
                    moved[0], reference=reference, masses=moved[1], epsilon=epsilon, engine=engine, **TIGHT
                )
                return float((found.points * cotangent).sum())

            h = 2e-4
            slope = (8 * (value(h) - value(-h)) - (value(2 * h) - value(-2 * h))) / (12 * h)
            scale = max(abs(slope), float(one.norm()))
            difference_gap = max(difference_gap, abs(float((one * direction).sum()) - slope) / scale)
    return unrolled_gap, difference_gap, used


def identity(engine: str) -> tuple[float, float]:
    """Worst distance to the nodes and worst entry of J - I for as many points as nodes."""
    place = jacobian = 0.0
    for seed in range(5):
        nodes, _ = cloud(seed, 5, 2)
        options = {"reference": nodes + 0.05, "relative": False, "epsilon": 0.05, "engine": engine, "tolerance": 1e-12}
        points = flow_pool(nodes, **options).points[0]
        order = torch.cdist(points, nodes).argmin(0)
        place = max(place, float((points[order] - nodes).abs().max()))
        found = torch.autograd.functional.jacobian(lambda y: flow_pool(y, **options).points[0][order], nodes).view(
            10, 10
        )
        jacobian = max(jacobian, float((found - torch.eye(10, dtype=torch.float64)).abs().max()))
    return place, jacobian


def invariances(engine: str) -> dict[str, float]:
    """Worst deviations over 20 random batches, relative to the scale of the clouds."""
    worst = dict.fromkeys(("permutation", "translation by 1e6", "scale by 1e-6 and 1e6", "batch company (bits)"), 0.0)
    for seed in range(20):
        nodes, generator = cloud(seed, 24, 3)
        batch = torch.arange(4).repeat_interleave(torch.tensor([9, 4, 6, 5]))
        reference = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        options = {"reference": reference, "engine": engine, "tolerance": 1e-12}
        points = flow_pool(nodes, batch, **options).points
        order = torch.randperm(24, generator=generator)
        permuted = flow_pool(nodes[order], batch[order], **options).points
        worst["permutation"] = max(worst["permutation"], float((permuted - points).abs().max()))
        moved = flow_pool(nodes + 1e6, batch, **options).points - 1e6
        worst["translation by 1e6"] = max(worst["translation by 1e6"], float((moved - points).abs().max()))
        for factor in (1e-6, 1e6):
            scaled = flow_pool(factor * nodes, batch, **options).points / factor
            worst["scale by 1e-6 and 1e6"] = max(worst["scale by 1e-6 and 1e6"], float((scaled - points).abs().max()))
        for graph in range(4):
            alone = flow_pool(nodes[batch == graph], **options).points[0]
            difference = float((alone != points[graph]).double().mean())
            worst["batch company (bits)"] = max(worst["batch company (bits)"], difference)
    return worst


def peak_memory(gradient: str, steps: int) -> float:
    """Peak of the memory that tensors hold in a forward and backward pass of so many small steps, in MB."""
    nodes, _ = cloud(0, 64 * 30, 8)
    reference, _ = cloud(1, 5, 8)
    batch = torch.arange(64).repeat_interleave(30)
    options = {"epsilon": 0.1, "step_size": 0.001, "tolerance": 1e-12, "engine": "torch", "gradient": gradient}
    with TensorMemory() as memory:
        inputs = nodes.requires_grad_()
        flow_pool(inputs, batch, reference=reference, max_steps=steps, **options).points.sum().backward()
    return memory.peak / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", default="torch,compiled")
    options = parser.parse_args()
    print(f"S_eps against OTT, 50 pairs: worst difference {against_ott():.1e}")
    for engine in options.engines.split(","):
        unrolled, difference, used = three_ways(engine)
        print(
            f"{engine}: implicit against unrolled {unrolled:.1e}, against differences {difference:.1e} "
            f"({used} problems)"
        )
        place, jacobian = identity(engine)
        print(f"{engine}: M = N: |X* - Y| {place:.1e}, |J - I| {jacobian:.1e}")
        print(f"{engine}: " + ", ".join(f"{name} {value:.1e}" for name, value in invariances(engine).items()))
    for gradient in ("implicit", "unrolled"):
        few, many = peak_memory(gradient, 10), peak_memory(gradient, 1000)
        print(f"peak of tensor memory, {gradient}: {few:.2f} MB at 10 steps, {many:.2f} MB at 1000")


if __name__ == "__main__":
    main()
