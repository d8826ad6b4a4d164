"""A classifier of point clouds in plain JAX: pooling is one function among others, under jit and grad."""

import sys

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    sys.exit("This example needs JAX: pip install 'flowpool[jax]'.")

from matplotlib.figure import Figure

from flowpool import references
from flowpool.jax import flow_pool

CLOUDS, MOST, POINTS, WIDTH = 32, 40, 4, 16


def make_clouds(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rings (class 1) and discs (class 0) of 20 to 40 points, padded to one shape; padding belongs to no cloud."""
    sizes, angles, radii = jax.random.split(key, 3)
    count = jax.random.randint(sizes, (CLOUDS,), 20, MOST + 1)
    angle = jax.random.uniform(angles, (CLOUDS, MOST), maxval=2 * jnp.pi)
    radius = jnp.sqrt(jax.random.uniform(radii, (CLOUDS, MOST)))
    labels = jnp.arange(CLOUDS) % 2
    radius = jnp.where(labels[:, None] == 1, 1.0, radius)
    x = jnp.stack([radius * jnp.cos(angle), radius * jnp.sin(angle)], -1).reshape(-1, 2)
    real = jnp.arange(MOST) < count[:, None]
    ids = jnp.where(real, jnp.arange(CLOUDS)[:, None], CLOUDS).ravel()
    return x, ids, labels


REFERENCE = references.normal(2, POINTS).numpy()


def logits(weights: dict[str, jax.Array], x: jax.Array, ids: jax.Array) -> jax.Array:
    points = flow_pool(x @ weights["first"], ids, REFERENCE, num_segments=CLOUDS).points
    hidden = jnp.tanh(points @ weights["second"] + weights["bias"])  # of each point
    return hidden.mean(1) @ weights["head"] + weights["shift"]


def loss(weights: dict[str, jax.Array], x: jax.Array, ids: jax.Array, labels: jax.Array) -> jax.Array:
    return -jax.nn.log_softmax(logits(weights, x, ids))[jnp.arange(CLOUDS), labels].mean()


@jax.jit
def step(weights, momentum, key):  # type: ignore[no-untyped-def]
    value, gradient = jax.value_and_grad(loss)(weights, *make_clouds(key))
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
    return jax.tree.map(lambda w, m: w - 0.1 * m, weights, momentum), momentum, value


second, head, data, fresh = jax.random.split(jax.random.key(0), 4)
weights = {
    "first": jnp.eye(2),
    "second": 2 * jax.random.normal(second, (2, WIDTH)),
    "bias": jnp.ones(WIDTH),
    "head": jax.random.normal(head, (WIDTH, 2)) / WIDTH,
    "shift": jnp.zeros(2),
}
momentum = jax.tree.map(jnp.zeros_like, weights)
losses = []
for number in range(1, 61):
    weights, momentum, value = step(weights, momentum, jax.random.fold_in(data, number))
    losses.append(float(value))
    if number in (1, 20, 40, 60):
        print(f"step {number:2}: loss {float(value):.3f}")

x, ids, labels = make_clouds(fresh)
right = jax.jit(logits)(weights, x, ids).argmax(1) == labels
print(f"new clouds told apart: {int(right.sum())} of {CLOUDS}")

points = flow_pool(x, ids, REFERENCE, num_segments=CLOUDS).points
figure = Figure(figsize=(8, 3.2), layout="constrained")
curve, *panes = figure.subplots(1, 3)
curve.plot(losses, color="#0072b2")
curve.set(xlabel="step", ylabel="loss")
for cloud, axes in enumerate(panes):
    axes.scatter(*x[ids == cloud].T, s=18, color="#56b4e9")
    axes.scatter(*points[cloud].T, s=90, color="#d55e00", edgecolor="black")
    axes.set(title=("disc", "ring")[cloud], aspect="equal", xticks=[], yticks=[])
figure.savefig("train_with_jax.png", dpi=110)
