"""A classifier of point clouds in plain JAX: pooling is one function among others, under jit and grad."""

import sys

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    sys.exit("This example needs JAX: pip install 'flowpool[jax]'.")

from flowpool import references
from flowpool.jax import flow_pool

CLOUDS, MOST, POINTS, WIDTH = 32, 40, 4, 4


def make_clouds(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rings (class 1) and discs (class 0) of 20 to 40 points, padded to one shape; padding belongs to no cloud."""
    sizes, angles, radii = jax.random.split(key, 3)
    count = jax.random.randint(sizes, (CLOUDS,), 20, MOST + 1)
    angle = jax.random.uniform(angles, (CLOUDS, MOST), maxval=2 * jnp.pi)
    radius = jnp.sqrt(jax.random.uniform(radii, (CLOUDS, MOST)))
    labels = jnp.arange(CLOUDS) % 2
    # A ring of this radius has the variance of the disc, so that mean and covariance cannot tell them apart.
    radius = jnp.where(labels[:, None] == 1, jnp.sqrt(0.5), radius)
    x = jnp.stack([radius * jnp.cos(angle), radius * jnp.sin(angle)], -1).reshape(-1, 2)
    real = jnp.arange(MOST) < count[:, None]
    ids = jnp.where(real, jnp.arange(CLOUDS)[:, None], CLOUDS).ravel()
    return x, ids, labels


REFERENCE = references.normal(POINTS, WIDTH).numpy()


def logits(weights: dict[str, jax.Array], x: jax.Array, ids: jax.Array) -> jax.Array:
    nodes = jnp.tanh(x @ weights["first"] + weights["bias"])
    pooled = flow_pool(nodes, ids, REFERENCE, num_segments=CLOUDS)
    return pooled.points.reshape(CLOUDS, -1) @ weights["head"] + weights["shift"]


def loss(weights: dict[str, jax.Array], x: jax.Array, ids: jax.Array, labels: jax.Array) -> jax.Array:
    return -jax.nn.log_softmax(logits(weights, x, ids))[jnp.arange(CLOUDS), labels].mean()


@jax.jit
def step(weights, momentum, x, ids, labels):  # type: ignore[no-untyped-def]
    value, gradient = jax.value_and_grad(loss)(weights, x, ids, labels)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
    return jax.tree.map(lambda w, m: w - 0.2 * m, weights, momentum), momentum, value


first, head, data, fresh = jax.random.split(jax.random.key(0), 4)
weights = {
    "first": jax.random.normal(first, (2, WIDTH)),
    "bias": jnp.zeros(WIDTH),
    "head": 0.1 * jax.random.normal(head, (POINTS * WIDTH, 2)),
    "shift": jnp.zeros(2),
}
momentum = jax.tree.map(jnp.zeros_like, weights)
clouds = make_clouds(data)
for number in range(1, 101):
    weights, momentum, value = step(weights, momentum, *clouds)
    if number in (1, 30, 60, 100):
        print(f"step {number:3}: loss {float(value):.3f}")

x, ids, labels = make_clouds(fresh)
right = jax.jit(logits)(weights, x, ids).argmax(1) == labels
print(f"new clouds told apart: {int(right.sum())} of {CLOUDS}")
