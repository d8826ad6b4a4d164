"""What is installed, which engine works here, and whether its answers agree with an oracle that shares no code with it.

Nothing is imported at the top that may be missing or broken: to tell that is the point.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import numpy as np

PACKAGES = (
    "flowpool",
    "torch",
    "numpy",
    "numba",
    "llvmlite",
    "torch_geometric",
    "scipy",
    "scikit-learn",
    "POT",
    "grakel",
    "pyarrow",
    "jax",
    "ott-jax",
)
VARIABLES = (
    "FLOWPOOL_DATA",
    "OMP_NUM_THREADS",
    "NUMBA_CACHE_DIR",
    "NUMBA_CPU_NAME",
    "NUMBA_DISABLE_JIT",
    "NUMBA_NUM_THREADS",
    "ATEN_CPU_CAPABILITY",
)

Verdict = Literal["ok", "failed", "absent"]
Engine = Literal["compiled", "torch"]
_TOLERANCE = 1e-5  # of pooling, relative to the scale R of a graph
_AGREE = 1e-4  # what oracles may find: the tolerance above, a few times over
_EPSILON = 0.1


@dataclass(frozen=True)
class Check:
    """One thing that was tried: ``absent`` if a package that it needs is not installed, which is no failure."""

    name: str
    verdict: Verdict
    detail: str


@dataclass(frozen=True)
class Examination:
    """Everything that a bug report needs; no names of files, users or machines are in it.

    Attributes:
        system: Python, platform, cores and threads.
        packages: versions of installed packages, None where one is missing.
        variables: environment variables that change how we compute, as far as they are set.
        checks: what was tried.
    """

    system: dict[str, str | int]
    packages: dict[str, str | None]
    variables: dict[str, str]
    checks: list[Check]

    @property
    def is_healthy(self) -> bool:
        return all(check.verdict != "failed" for check in self.checks)

    def as_data(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "healthy": self.is_healthy}


def examine(on_check: Callable[[Check], None] = lambda _: None) -> Examination:
    """Tries everything; a check that raises has failed, and the others go on.

    Args:
        on_check: called with each check as it ends.
    """
    checks = []
    for check in _checks():
        on_check(check)
        checks.append(check)
    return Examination(_system(), {name: _version(name) for name in PACKAGES}, _variables(), checks)


def _checks() -> Iterator[Check]:
    missing = [name for name in ("torch", "numpy") if _version(name) is None]
    if missing:
        yield Check("packages", "failed", f"{', '.join(missing)} missing; pip install flowpool brings it")
        return
    yield _try("torch engine", lambda: _pooling("torch"))
    for name, check in (
        ("compiled engine", lambda: _pooling("compiled")),
        ("both engines agree", _agreement),
    ):
        if _version("numba") is None:
            yield Check(
                name, "absent", "numba is not installed; pip install numba makes pooling on a CPU many times faster"
            )
        else:
            yield _try(name, check)
    yield _try("gradient", _gradient)
    yield _try("transport_pool", _transport)
    if _version("torch_geometric") is None:
        yield Check(
            "layers for PyG", "absent", "PyTorch Geometric is not installed; pip install 'flowpool[pyg]' brings it"
        )
    else:
        yield _try("layers for PyG", _layer)


def _try(name: str, check: Callable[[], tuple[bool, str]]) -> Check:
    try:
        agrees, detail = check()
    except Exception as error:
        lines = str(error).strip().splitlines()
        return Check(name, "failed", f"{type(error).__name__}: {lines[0] if lines else 'without a message'}")
    return Check(name, "ok" if agrees else "failed", detail)


def _pooling(engine: Engine) -> tuple[bool, str]:
    """Points are stationary: where they are, plain Sinkhorn iterations in NumPy find no velocity."""
    from flowpool import flow_pool

    nodes, batch, reference = _sample()
    pooled = flow_pool(nodes, batch, reference=reference, epsilon=_EPSILON, tolerance=_TOLERANCE, engine=engine)
    worst = 0.0
    for graph in range(2):
        cloud, points = nodes[batch == graph].numpy(), pooled.points[graph].numpy()
        radius = float(np.sqrt(np.square(cloud - cloud.mean(0)).sum(1).mean()))
        level = _EPSILON * radius**2
        drift = _barycentres(points, cloud, level) - _barycentres(points, points, level)
        worst = max(worst, float(np.abs(drift).max()) / radius)
    status = "all OK" if bool(pooled.converged.all()) else "not converged"
    return (
        status == "all OK" and worst < _AGREE,
        f"{status}; largest velocity left, by an oracle in NumPy: {worst:.1e} R",
    )


def _agreement() -> tuple[bool, str]:
    found = [_points(engine) for engine in ("compiled", "torch")]
    worst = float(np.abs(found[0] - found[1]).max())
    return worst < _AGREE, f"largest difference of a coordinate: {worst:.1e}"


def _points(engine: Engine) -> np.ndarray:
    from flowpool import flow_pool

    nodes, batch, reference = _sample()
    points: np.ndarray = flow_pool(nodes, batch, reference=reference, engine=engine).points.numpy()
    return points


def _gradient() -> tuple[bool, str]:
    """The implicit gradient along a direction, against the difference of two solves."""
    import torch

    from flowpool import flow_pool

    nodes, batch, reference = _sample()
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(2, *reference.shape, generator=generator, dtype=torch.float64)
    direction = torch.randn(nodes.shape, generator=generator, dtype=torch.float64)

    def objective(moved: Any) -> Any:
        return (flow_pool(moved, batch, reference=reference, tolerance=1e-10).points * weights).sum()

    leaf = nodes.clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective(leaf), leaf)
    step = 1e-5
    difference = float(objective(nodes + step * direction) - objective(nodes - step * direction)) / (2 * step)
    error = abs(float((slope * direction).sum()) - difference) / max(1.0, abs(difference))
    return error < _AGREE, f"relative difference to finite differences: {error:.1e}"


def _transport() -> tuple[bool, str]:
    from flowpool import transport_pool

    nodes, batch, reference = _sample()
    received = transport_pool(nodes, batch, reference=reference, epsilon=_EPSILON, relative=False)
    worst = max(
        float(np.abs(received.points[graph].numpy() - _barycentres(reference.numpy(), cloud.numpy(), _EPSILON)).max())
        for graph, cloud in enumerate((nodes[batch == 0], nodes[batch == 1]))
    )
    return worst < _AGREE, f"largest difference to plain Sinkhorn iterations in NumPy: {worst:.1e}"


def _layer() -> tuple[bool, str]:
    from flowpool import FlowPool

    nodes, batch, _ = _sample()
    layer = FlowPool(nodes.shape[1], 4).double()
    both, alone = layer(nodes, batch), layer(nodes[batch == 1])
    worst = float((both[1:] - alone).abs().max())
    return worst == 0.0, f"a graph alone and in a batch differ by {worst:.1e}"


def _sample() -> tuple[Any, Any, Any]:
    """Two graphs of 12 and 17 nodes with 3 features in float64, and 4 reference points."""
    import torch

    generator = torch.Generator().manual_seed(0)
    nodes = torch.randn(29, 3, generator=generator, dtype=torch.float64)
    reference = torch.randn(4, 3, generator=generator, dtype=torch.float64) / 2
    return nodes, torch.tensor([0] * 12 + [1] * 17), reference


def _barycentres(points: np.ndarray, cloud: np.ndarray, level: float) -> np.ndarray:
    """Where the entropic plan sends each point: the textbook's iterations with equal masses, ``(M, D)``."""
    scores = -np.square(points[:, None] - cloud).sum(2) / level  # (M, N)
    f, g = np.zeros(len(points)), np.zeros(len(cloud))
    for _ in range(5000):
        g = -np.log(len(cloud)) - _log_sum_exp(scores + f[:, None], 0)
        f = -np.log(len(points)) - _log_sum_exp(scores + g, 1)
    plan = np.exp(scores + f[:, None] + g)
    mapped: np.ndarray = len(points) * plan @ cloud
    return mapped


def _log_sum_exp(values: np.ndarray, axis: int) -> np.ndarray:
    top = values.max(axis, keepdims=True)
    total: np.ndarray = np.log(np.exp(values - top).sum(axis)) + top.squeeze(axis)
    return total


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _system() -> dict[str, str | int]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count() or 1,
        "bits": 64 if sys.maxsize > 2**32 else 32,
    }


def _variables() -> dict[str, str]:
    # Where data lies is nobody's business; that the variable is set may matter.
    return {
        name: "set" if name in ("FLOWPOOL_DATA", "NUMBA_CACHE_DIR") else os.environ[name]
        for name in VARIABLES
        if name in os.environ
    }
