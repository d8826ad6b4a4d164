"""What the conformance tests share: clouds with known answers, and ways to run a program of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest
import torch
from torch import Tensor

import flowpool
from flowpool import flow_pool, references
from flowpool.nn.pool import FlowPool
from flowpool.pooling import BackwardReport

PROGRAMS = Path(__file__).parent / "programs"
SOURCES = Path(flowpool.__file__).parents[1]


class Outcome(Protocol):
    """What every form of the pool is reduced to."""

    @property
    def points(self) -> Tensor: ...  # (B, M, D)
    @property
    def status(self) -> Tensor: ...  # (B,)
    @property
    def residual(self) -> Tensor: ...  # (B,)
    @property
    def steps(self) -> Tensor: ...  # (B,)
    @property
    def backward(self) -> BackwardReport: ...


@dataclass(frozen=True)
class Pool:
    """One form of pooling with one engine: ``pool(x, batch, ptr, **options)`` gives points, status and residual.

    ``reference`` may be left out: it is then a seeded one with ``num_points`` rows in the dtype of x.
    """

    form: str
    engine: str

    def same(self, one: Tensor, other: Tensor) -> bool:
        """Whether two answers to the same question are equal: to the bit, or to rounding from the torch engine (row 10)."""
        if self.engine == "torch":
            return torch.allclose(
                one, other, rtol=1e-8, atol=1e-8 if one.dtype == torch.float64 else 1e-5, equal_nan=True
            )
        return torch.equal(one, other)

    def __call__(
        self,
        x: Tensor,
        batch: Tensor | None = None,
        ptr: Tensor | None = None,
        *,
        num_points: int = 3,
        reference: Tensor | None = None,
        **options: Any,
    ) -> Outcome:
        if reference is None:
            width = x.shape[-1] if isinstance(x, Tensor) and x.dim() and x.shape[-1] else 1
            floating = isinstance(x, Tensor) and x.is_floating_point()
            reference = start(num_points, width, x.dtype if floating else torch.float64)
        refused = refused_by_compiled(options) if self.engine == "compiled" else None
        if refused is not None:
            pytest.skip(f"the compiled engine refuses {refused}")
        return FORM_CALLS[self.form](x, batch, ptr, reference=reference, engine=self.engine, **options)


def refused_by_compiled(options: dict[str, Any]) -> str | None:
    """What of some options the compiled engine refuses, as ``tests/engines/test_choice.py`` shows."""
    shares = options.get("point_masses")
    if options.get("cost", "sqeuclidean") != "sqeuclidean":
        return "other costs"
    if not options.get("debias", True):
        return "debias=False"
    if options.get("step_size") is not None:
        return "a fixed step"
    if options.get("gradient") == "unrolled":
        return "gradient='unrolled'"
    if isinstance(shares, Tensor) and shares.requires_grad and torch.is_grad_enabled():
        return "a gradient in point_masses"
    return None


def _by_function(x: Tensor, batch: Tensor | None, ptr: Tensor | None, **options: Any) -> Outcome:
    return flow_pool(x, batch, ptr, **options)


class LayerOutcome(NamedTuple):
    """The output of the layer as points, beside its report."""

    points: Tensor
    status: Tensor
    residual: Tensor
    steps: Tensor
    backward: BackwardReport


def _by_layer(
    x: Tensor,
    batch: Tensor | None,
    ptr: Tensor | None,
    *,
    reference: Tensor,
    dim_size: int | None = None,
    masses: Tensor | None = None,
    **settings: Any,
) -> Outcome:
    num_points, width = reference.shape
    layer = FlowPool(width, num_points, reference=reference, on_failure="ignore", **settings)
    output = layer(x, batch, ptr, dim_size, masses=masses)
    report = layer.report
    assert report is not None
    points = output.view(output.shape[0], num_points, width)
    return LayerOutcome(points, report.status, report.residual, report.steps, report.backward)


FORM_CALLS: dict[str, Callable[..., Outcome]] = {"function": _by_function, "layer": _by_layer}


def cloud(num_nodes: int, num_features: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Seeded normal features, ``(N, D)``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_nodes, num_features, generator=generator, dtype=torch.float64).to(dtype)


def grid_cloud(num_nodes: int, num_features: int, seed: int = 0) -> Tensor:
    """Features that take few values, as message passing on node labels gives them: most nodes have a twin."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (num_nodes, num_features), generator=generator).double()


def start(num_points: int, num_features: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """A reference cloud in the dtype asked for."""
    return references.normal(num_features, num_points, seed).to(dtype)


def index_of(sizes: list[int]) -> Tensor:
    """The batch vector of graphs with these numbers of nodes."""
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def weighting(points: Tensor) -> Tensor:
    """A fixed cotangent without symmetry, of the shape of ``points``."""
    return torch.linspace(-1.0, 2.0, points.numel(), dtype=points.dtype).view_as(points).cos()


def radius(nodes: Tensor) -> float:
    """R, the root of the sum of the variances."""
    return float((nodes.double() - nodes.double().mean(0)).square().sum(-1).mean().sqrt())


def run(program: str, *arguments: str, timeout: float = 60.0, threads: int | None = None) -> str:
    """Output of one of the programs, run in a Python process of its own; fails when it exits with an error."""
    finished = subprocess.run(  # noqa: S603 - our own program, fixed arguments
        [sys.executable, str(PROGRAMS / program), *arguments],
        env=environment(threads),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert finished.returncode == 0, f"{program} exited with {finished.returncode}:\n{finished.stderr[-3000:]}"
    return finished.stdout


def environment(threads: int | None = None) -> dict[str, str]:
    """Variables of a child process that imports the same sources, with a number of threads if one is given."""
    variables = dict(os.environ)
    path = [str(SOURCES), str(Path(__file__).parent), variables.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    return variables
