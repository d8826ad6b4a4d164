"""FlowPool for JAX: :func:`flow_pool` and :func:`transport_pool` on arrays, by the same kernels and to the same bits.

Both are ordinary JAX functions: under ``jit`` the host is called back, under ``grad`` once more with the cotangent, and under
``vmap`` once for each element. Many graphs are quicker in one call than by ``vmap``: shapes are static in JAX, so the number of
graphs is an argument, and padding is a segment id that is none of theirs, as in ``jax.ops.segment_sum``. Reverse mode only;
there is no second derivative.
Double precision is switched on for all threads, by ``jax.config.update("jax_enable_x64", True)``: a callback may run in
another one.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from functools import cache, partial
from numbers import Integral
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

import flowpool

try:
    import jax
    import jax.numpy as jnp
except ImportError as missing:
    raise ImportError("flowpool.jax needs JAX: pip install 'flowpool[jax]'.") from missing

__all__ = ["Pooled", "Received", "flow_pool", "transport_pool"]

Arrays = dict[str, Any]


class Pooled(NamedTuple):
    """Pooled points of B graphs; only ``points`` has a gradient.

    Attributes:
        points: X*, ``(B, M, D)``.
        residual: length of the Newton step left at X*, relative to the graph's scale, ``(B,)``.
        steps: ``(B,)`` int32.
        status: :class:`flowpool.Status` codes, ``(B,)`` int8.
    """

    points: jax.Array
    residual: jax.Array
    steps: jax.Array
    status: jax.Array


class Received(NamedTuple):
    """What each reference point receives of B graphs, as in :class:`flowpool.Received`; all with gradients."""

    masses: jax.Array  # (B, M)
    points: jax.Array  # (B, M, D)
    variances: jax.Array  # (B, M, D)


def flow_pool(
    x: Any,
    segment_ids: Any,
    reference: Any,
    *,
    num_segments: int,
    masses: Any = None,
    point_masses: Any = None,
    epsilon: Any = 0.1,
    relative: bool = True,
    cost: str = "sqeuclidean",
    debias: bool = True,
    tolerance: float = 1e-5,
    max_steps: int = 1000,
    step_size: float | None = None,
    ridge: float | None = None,
    engine: Literal["auto", "compiled", "torch"] = "auto",
) -> Pooled:
    """The M points per graph whose Sinkhorn divergence to the node cloud is least; see :func:`flowpool.flow_pool`.

    Args:
        x: node features Y, ``(N, D)``.
        segment_ids: graph of each node, ``(N,)``, in any order. Nodes with an id outside ``0..num_segments - 1`` are
            left out, as those that fill up a padded batch should be.
        reference: X^(0), ``(M, D)``; no gradient flows to it.
        num_segments: number of graphs, B.
        masses: of the nodes, ``(N,)``; ``None``: equal.
        point_masses: of the points, ``(M,)``; ``None``: equal. No gradient flows to them.
        epsilon: a number, or one value per graph ``(B,)``.
        relative, cost, debias, tolerance, max_steps, step_size, ridge, engine: as in :func:`flowpool.flow_pool`, the
            cost by its name.

    Gradients in ``x``, ``masses`` and ``epsilon`` are those of the implicit function theorem.
    """
    given = _checked(x, segment_ids, reference, masses, num_segments)
    if point_masses is not None:
        given["point_masses"] = _array("point_masses", point_masses, given["reference"].shape[:1], given["x"].dtype)
    options: dict[str, Any] = {
        "relative": relative,
        "cost": cost,
        "debias": debias,
        "tolerance": tolerance,
        "max_steps": max_steps,
        "step_size": step_size,
        "ridge": ridge,
        "engine": engine,
    }
    if isinstance(epsilon, int | float):
        options["epsilon"] = epsilon  # to the last bit, also where x has fewer
    else:
        level = jnp.asarray(epsilon)
        given["epsilon"] = _array("epsilon", level, (num_segments,) if level.ndim else (), given["x"].dtype)
    points, *rest = _called(_call("flow", num_segments, options, given), given)
    return Pooled(points.astype(jnp.asarray(x).dtype), *rest)


def transport_pool(
    x: Any,
    segment_ids: Any,
    reference: Any,
    *,
    num_segments: int,
    epsilon: Any = 0.1,
    relative: bool = True,
    free: bool = False,
    masses: Any = None,
) -> Received:
    """What each point of a shared reference receives of each graph; see :func:`flowpool.transport_pool`.

    Args:
        x, segment_ids, num_segments, masses: as in :func:`flow_pool`.
        reference: X, ``(M, D)``. A gradient flows to it.
        epsilon: entropic regularisation, a number.
        relative: epsilon and the reference are in units of each graph, as in :func:`flow_pool`; otherwise absolute.
        free: each point receives whatever is near it, instead of the M-th part of the graph.

    Gradients in ``x``, ``masses``, ``reference`` and ``epsilon`` are exact.
    """
    given = _checked(x, segment_ids, reference, masses, num_segments)
    options: dict[str, Any] = {"free": free, "relative": relative}
    if isinstance(epsilon, int | float):
        options["epsilon"] = epsilon
    else:
        given["epsilon"] = _array("epsilon", epsilon, (), given["x"].dtype)
    found = _called(_call("transport", num_segments, options, given), given)
    return Received(*(value.astype(jnp.asarray(x).dtype) for value in found))


def _checked(x: Any, segment_ids: Any, reference: Any, masses: Any, num_segments: int) -> Arrays:
    """The inputs as arrays of one floating-point dtype, after all checks of what is known when they are traced."""
    nodes, ids, start = map(jnp.asarray, (x, segment_ids, reference))
    if nodes.ndim != 2 or not jnp.issubdtype(nodes.dtype, jnp.floating):
        raise ValueError(f"x is {nodes.dtype}{nodes.shape}; expected real numbers, (num_nodes, num_features).")
    if ids.shape != nodes.shape[:1] or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"segment_ids is {ids.dtype}{ids.shape}; expected integers, ({len(nodes)},), one per node.")
    if start.ndim != 2 or start.shape[0] == 0:
        raise ValueError(f"reference has shape {start.shape}; expected (num_points, {nodes.shape[1]}).")
    if not isinstance(num_segments, Integral) or num_segments < 0:
        raise ValueError(
            f"num_segments is {num_segments}; pass the number of graphs, known when the function is traced."
        )
    dtype = jnp.promote_types(nodes.dtype, jnp.float32)
    given = {"x": nodes.astype(dtype), "segment_ids": ids}
    given["reference"] = _array("reference", start, (start.shape[0], nodes.shape[1]), dtype)
    if masses is not None:
        given["masses"] = _array("masses", masses, ids.shape, dtype)
    return given


def _array(name: str, value: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    array = jnp.asarray(value)
    if array.shape != shape or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} is {array.dtype}{array.shape}; expected real numbers of shape {shape}.")
    return array.astype(dtype)


class _Call(NamedTuple):
    """What is fixed when a function is traced."""

    kind: Literal["flow", "transport"]
    num_segments: int
    options: tuple[tuple[str, Any], ...]

    @property
    def learned(self) -> tuple[str, ...]:
        """What gradients flow to."""
        return ("x", "masses", "epsilon") if self.kind == "flow" else ("x", "masses", "epsilon", "reference")

    def outputs(self, given: Arrays) -> list[jax.ShapeDtypeStruct]:
        """Shapes of what comes out."""
        graphs, (points, features), dtype = self.num_segments, given["reference"].shape, given["x"].dtype
        if self.kind == "transport":
            sizes = [(graphs, points), (graphs, points, features), (graphs, points, features)]
            return [jax.ShapeDtypeStruct(size, dtype) for size in sizes]
        kinds = [((graphs, points, features), dtype), ((graphs,), dtype), ((graphs,), np.int32), ((graphs,), np.int8)]
        return [jax.ShapeDtypeStruct(size, kind) for size, kind in kinds]


def _call(kind: Literal["flow", "transport"], num_segments: int, options: Arrays, given: Arrays) -> _Call:
    """What is fixed when a function is traced, after all checks of it: later, JAX would bury what they say."""
    call = _Call(kind, num_segments, tuple(options.items()))
    _pool_nothing(call._replace(num_segments=0), given["x"].shape[1])
    return call


@cache
def _pool_nothing(call: _Call, features: int) -> None:
    nothing = torch.zeros(0, features)
    _pool(
        call,
        {"x": nothing, "segment_ids": nothing.new_zeros(0, dtype=torch.long), "reference": torch.ones(1, features)},
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _called(call: _Call, given: Arrays) -> tuple[jax.Array, ...]:
    return tuple(jax.pure_callback(_callback(_forward, call), call.outputs(given), given, vmap_method="sequential"))


def _remember(call: _Call, given: Arrays) -> tuple[tuple[jax.Array, ...], Arrays]:
    callback = _callback(_forward_to_differentiate, call)
    return tuple(jax.pure_callback(callback, call.outputs(given), given, vmap_method="sequential")), given


def _differentiate(call: _Call, given: Arrays, cotangents: tuple[Any, ...]) -> tuple[Arrays]:
    wanted = [name for name in call.learned if name in given]
    shapes = [jax.ShapeDtypeStruct(given[name].shape, given[name].dtype) for name in wanted]
    upstream = list(cotangents[:1] if call.kind == "flow" else cotangents)
    found = jax.pure_callback(_callback(_backward, call), shapes, given, upstream, vmap_method="sequential")
    gradients = dict(zip(wanted, found, strict=True))
    return ({name: gradients.get(name, _nothing(value)) for name, value in given.items()},)


_called.defvjp(_remember, _differentiate)


def _nothing(value: jax.Array) -> Any:
    whole = jnp.issubdtype(value.dtype, jnp.integer)
    return np.zeros(value.shape, jax.dtypes.float0) if whole else jnp.zeros_like(value)


@cache
def _callback(function: Callable[..., Any], call: _Call) -> Callable[..., Any]:
    """One and the same object for equal calls, so that JAX need not compile anew."""
    return partial(function, call)


# From here on nothing is of JAX. Its arrays become those of NumPy at the door: computing with them while XLA waits for
# the callback can lock up.


def _forward(call: _Call, given: Arrays) -> list[np.ndarray]:
    return _arrays(_pool(call, _tensors(given)))


def _forward_to_differentiate(call: _Call, given: Arrays) -> list[np.ndarray]:
    return _arrays(_pool_and_keep(call, _tensors(given)))


def _backward(call: _Call, given: Arrays, cotangents: list[Any]) -> list[np.ndarray]:
    upstream = _tensors(dict(enumerate(cotangents))).values()
    return _arrays(_gradients(call, _tensors(given), *upstream))


def _tensors(given: dict[Any, Any]) -> dict[Any, Tensor]:
    """Copies, because what JAX hands over must not be written to."""
    return {name: torch.from_numpy(np.array(value, order="C")) for name, value in given.items()}


def _arrays(tensors: list[Tensor]) -> list[np.ndarray]:
    return [value.detach().numpy() for value in tensors]


def _pool(call: _Call, given: Arrays) -> list[Tensor]:
    """One call of the pooling function, on tensors; what requires a gradient gets one."""
    ids, options = given["segment_ids"], dict(call.options)
    x, masses = given["x"], given.get("masses")
    inside = (ids >= 0) & (ids < call.num_segments)
    if not bool(inside.all()):
        x, ids, masses = x[inside], ids[inside], None if masses is None else masses[inside]
    options |= {"masses": masses, "dim_size": call.num_segments}
    if "epsilon" in given:
        # In double precision, in which torch adds up the gradients of graphs that share a number.
        options["epsilon"] = given["epsilon"].double() if call.kind == "flow" else given["epsilon"]
    if call.kind == "transport":
        return list(flowpool.transport_pool(x, ids, reference=given["reference"], **options)[:3])
    weights = given.get("point_masses")
    pooled = flowpool.flow_pool(
        x, ids, reference=given["reference"], point_masses=weights, on_failure="ignore", **options
    )
    return [pooled.points, pooled.residual.to(x.dtype), pooled.steps.int(), pooled.status]


# The last forward passes whose gradients may be asked for, by the content of their inputs: leaves and outputs. No answer
# depends on what is here, because a backward pass that does not find its own pools once more.
_kept: dict[bytes, tuple[list[Tensor], list[Tensor]]] = {}
_MOST_KEPT = 4
_lock = threading.Lock()


def _pool_and_keep(call: _Call, given: Arrays) -> list[Tensor]:
    key = _key(call, given)
    leaves = [given[name].requires_grad_() for name in call.learned if name in given]
    outputs = _pool(call, given)
    with _lock:
        _kept[key] = leaves, outputs
        while len(_kept) > _MOST_KEPT:
            del _kept[next(iter(_kept))]
    return outputs


def _gradients(call: _Call, given: Arrays, *upstream: Tensor) -> list[Tensor]:
    """Gradients of ``<upstream, outputs>`` in what is learned."""
    key = _key(call, given)
    with _lock:
        found = _kept.pop(key, None)
    if found is None:
        leaves = [given[name].requires_grad_() for name in call.learned if name in given]
        found = leaves, _pool(call, given)
    return list(torch.autograd.grad(found[1][: len(upstream)], found[0], upstream, materialize_grads=True))


def _key(call: _Call, given: Arrays) -> bytes:
    digest = hashlib.blake2b(repr(call).encode(), digest_size=32)
    for name, value in given.items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.numpy())
    return digest.digest()
