"""The paper's scheme, by OTT-JAX and jaxopt, beside flow_pool: the same points and the same gradients.

Algorithm 1 descends the Sinkhorn divergence with a fixed step, with plans from OTT's Sinkhorn, and jaxopt solves the linear system
of its implicit gradient. The more steps it takes, the closer it comes to the
pooled points. ``flow_pool`` ends where that flow ends.
"""

import sys
import time

try:
    import jax
    import jax.numpy as jnp

    from flowpool.lab.paper.scheme import Scheme, pooled_by_ott

    pooled_by_ott(Scheme(1.0, 1.0, 1))
except ImportError:
    sys.exit("This example needs JAX, OTT and jaxopt: pip install 'flowpool[jax]' ott-jax jaxopt.")

from matplotlib.figure import Figure

from flowpool import references
from flowpool.jax import flow_pool

jax.config.update("jax_enable_x64", True)
NODES, POINTS, EPSILON, TAU = 20, 4, 0.3, 0.25

x = jax.random.normal(jax.random.key(0), (NODES, 2), jnp.float64)
ids = jnp.zeros(NODES, jnp.int32)
masses = jnp.full(NODES, 1 / NODES)
reference = references.normal(2, POINTS).double().numpy()
weights = jax.random.normal(jax.random.key(1), (POINTS, 2), jnp.float64)


def paper(nodes: jax.Array, steps: int) -> jax.Array:
    """Algorithm 1: in the metric of the masses 1 / M, a step of tau goes M tau / 2 along the gradient."""
    scheme = Scheme(EPSILON, TAU * POINTS / 2, steps, threshold=1e-9)
    return pooled_by_ott(scheme)(jnp.asarray(reference), nodes, masses)


def ours(nodes: jax.Array) -> jax.Array:
    pooled = flow_pool(nodes, ids, reference, num_segments=1, epsilon=EPSILON, relative=False, tolerance=1e-10)
    return pooled.points[0]


def timed(function, *given):  # the second call, which does not compile
    jax.block_until_ready(function(*given))
    began = time.perf_counter()
    return jax.block_until_ready(function(*given)), time.perf_counter() - began


points, seconds = timed(jax.jit(ours), x)
slope, slope_seconds = timed(jax.jit(jax.grad(lambda nodes: (weights * ours(nodes)).sum())), x)
print(f"flow_pool: points in {1000 * seconds:.1f} ms, points and gradient in {1000 * slope_seconds:.1f} ms")
gaps = {}
for steps in (20, 80, 320):
    found, seconds = timed(jax.jit(lambda nodes, steps=steps: paper(nodes, steps)), x)
    gaps[steps] = float(jnp.abs(found - points).max())
    print(f"paper, {steps:3} steps: points differ by {gaps[steps]:.1e}, in {1000 * seconds:.0f} ms")

implicit, seconds = timed(jax.jit(jax.grad(lambda nodes: (weights * paper(nodes, 320)).sum())), x)
gap = jnp.linalg.norm(implicit - slope) / jnp.linalg.norm(slope)
print(f"paper, implicit gradient after 320 steps: differs by {gap:.1e} of its length, in {1000 * seconds:.0f} ms")

figure = Figure(figsize=(8, 3.4), layout="constrained")
plane, curve = figure.subplots(1, 2)
plane.scatter(*x.T, s=24, color="#56b4e9", label="nodes")
plane.scatter(*points.T, s=110, color="#d55e00", edgecolor="black", label="flow_pool")
plane.scatter(*found.T, marker="x", s=60, color="black", label="320 steps of OTT's gradient")
plane.set_aspect("equal")
plane.legend(fontsize=8, loc="lower left")
curve.semilogy(list(gaps), list(gaps.values()), marker="o", color="#0072b2")
curve.set(xticks=list(gaps), xlabel="steps of Algorithm 1", ylabel="distance to the points of flow_pool")
figure.savefig("jax_beside_ott.png", dpi=110)
