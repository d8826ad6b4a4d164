"""FlowPool as a layer: a PyTorch Geometric aggregation around :func:`flowpool.flow_pool`.

It stands wherever ``SortAggregation`` or ``global_mean_pool`` stood: as a global pool, as the ``aggr`` of a message
passing layer, as a member of a ``MultiAggregation``. TorchScript is not supported.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal, NoReturn

import torch
import torch.fx
import torch_geometric.nn.aggr
from torch import Tensor
from torch_geometric.experimental import disable_dynamic_shapes
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.inits import reset

from flowpool import costs, references
from flowpool.core.constants import RIDGE
from flowpool.core.measures import check_features, checked_index, checked_ptr, require_like
from flowpool.costs import CostFunction
from flowpool.pooling import BackwardReport, Options, Pooled, flow_pool
from flowpool.status import Status


@dataclass(frozen=True)
class Report:
    """How well the graphs of one call were pooled; holds neither features nor autograd history.

    Attributes:
        status: :class:`flowpool.Status` codes, ``(B,)`` int8.
        converged: stationary to the tolerance, or empty, ``(B,)`` bool.
        residual: length of the Newton step left, relative to the graph's scale, ``(B,)``.
        steps: ``(B,)``.
        backward: filled by the backward pass.
    """

    status: Tensor
    converged: Tensor
    residual: Tensor
    steps: Tensor
    backward: BackwardReport

    def graphs(self, status: Status) -> list[int]:
        """The graphs that have a status."""
        found: list[int] = (self.status == status.value).nonzero().flatten().tolist()
        return found

    def __str__(self) -> str:
        counts = ", ".join(f"{len(found)} {status.name}" for status in Status if (found := self.graphs(status)))
        if not counts:
            return "no graphs"
        worst = float(self.residual.nan_to_num(0.0).max())
        return f"{self.status.numel()} graphs: {counts}; at most {int(self.steps.max())} steps, residual {worst:.1e}"


class _Memory(threading.local):
    """What a layer remembers of its calls, for each thread; no computation reads it, and every copy starts blank."""

    def __init__(self) -> None:
        self.report: Report | None = None
        self.announced: set[Status] = set()

    def __reduce__(self) -> tuple[type[_Memory], tuple[()]]:
        return _Memory, ()


class FlowPool(Aggregation):
    r"""The M points of each graph whose Sinkhorn divergence to its node features is least, one after the other.

    .. math:: X^* = \arg\min_X S_\varepsilon(X, Y), \quad \text{reached by the Wasserstein gradient flow from } X^{(0)}

    Args:
        in_channels: D.
        num_points: M.
        reference: X^(0): ``"normal"`` draws it with the seed; or a tensor ``(M, D)``. It is a buffer, not trained.
        seed: of the drawn reference, and of :meth:`fit_reference`.
        mass: a measure forgets the size of its graph. ``"append"`` adds it as a last column, ``"scale"`` multiplies
            X* by it; the size is the number of nodes, or the total of their masses when these are given.
        on_failure: for graphs that were not pooled to the tolerance: ``"ignore"``, ``"warn"`` (once for each kind of
            status, in the life of the layer), or ``"raise"`` an ArithmeticError. :attr:`report` has them all.
        epsilon, relative, cost, debias, gradient, tolerance, max_steps, step_size, ridge, engine: as in
            :func:`flowpool.flow_pool`. A cost that is a module becomes a submodule, and its parameters are trained.
    """

    _version = 1  # of the state_dict

    reference: Tensor
    cost: costs.Cost

    def __init__(
        self,
        in_channels: int,
        num_points: int,
        *,
        epsilon: float = 0.1,
        relative: bool = True,
        cost: str | CostFunction = "sqeuclidean",
        reference: Literal["normal"] | Tensor = "normal",
        seed: int = 0,
        mass: Literal["append", "scale"] | None = None,
        debias: bool = True,
        gradient: Literal["implicit", "unrolled", "none"] = "implicit",
        tolerance: float = 1e-5,
        max_steps: int = 1000,
        step_size: float | None = None,
        ridge: float = RIDGE,
        engine: Literal["auto", "compiled", "torch"] = "auto",
        on_failure: Literal["ignore", "warn", "raise"] = "warn",
    ) -> None:
        super().__init__()
        if mass not in (None, "append", "scale"):
            raise ValueError(f"Unknown mass {mass!r}; pass None, 'append' or 'scale'.")
        if on_failure not in ("ignore", "warn", "raise"):
            raise ValueError(f"Unknown on_failure {on_failure!r}; pass 'ignore', 'warn' or 'raise'.")
        if not (math.isfinite(epsilon) and epsilon > 0):
            raise ValueError(f"epsilon is {epsilon}; it must be finite and > 0 (0.1 is a good start).")
        self.in_channels, self.num_points = in_channels, num_points
        self.epsilon, self.relative, self.seed = epsilon, relative, seed
        self.mass, self.on_failure = mass, on_failure
        self.options = Options(debias, gradient, tolerance, max_steps, step_size, ridge, engine)
        self.cost = costs.resolve(cost)
        self._initial = initial_reference(reference, num_points, in_channels, seed)
        self.register_buffer("reference", self._initial.clone())
        self._memory = _Memory()

    @property
    def out_channels(self) -> int:
        """Columns of the output: M * D, and one more with ``mass="append"``."""
        return self.num_points * self.in_channels + (self.mass == "append")

    @property
    def report(self) -> Report | None:
        """How well the last call in this thread went; None before the first one."""
        return self._memory.report

    def reset_parameters(self) -> None:
        """The reference that the layer was made with, in place of a fitted or loaded one, and a fresh cost."""
        self.reference.copy_(self._initial)
        reset(self.cost)

    @torch.no_grad()
    def fit_reference(self, source: Any) -> None:
        """Sets the reference to k-means centres of node features, where the flow then starts; needs scikit-learn.

        Args:
            source: node features ``(N, D)``, an object that has them as ``.x``, or an iterable of these, such as a
                ``DataLoader``. Behind a network: ``(network(data.x, data.edge_index) for data in loader)``.
        """
        items: Iterable[Any] = [source] if isinstance(source, Tensor) or hasattr(source, "x") else source
        batches = [self._checked(getattr(item, "x", item)).cpu().double() for item in items]
        if not batches:
            raise ValueError("fit_reference found no features: the iterable is empty.")
        features = torch.cat(batches)
        centres = references.kmeans(features, self.num_points, self.seed)
        if not self.relative:
            mean = features.mean(0)
            centres = mean + (features - mean).square().sum(-1).mean().sqrt() * centres
        self.reference.copy_(centres)

    def __call__(
        self, x: Tensor, index: Tensor | None = None, ptr: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor:
        # The base class computes with these before anyone has looked at their types, and fails in words of its own.
        if not torch.compiler.is_compiling() and not isinstance(x, torch.fx.Proxy):
            check_features(x)
            if index is not None:
                checked_index(index, x.shape[0], None)
            if ptr is not None:
                checked_ptr(ptr, x.shape[0], None)
        result: Tensor = super().__call__(x, index, ptr, *rest, **options)
        return result

    @disable_dynamic_shapes(required_args=["dim_size"])
    def forward(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        dim: int = -2,
        max_num_elements: int | None = None,
        masses: Tensor | None = None,
    ) -> Tensor:
        """Pooled points, ``(B, out_channels)``; zeros for a graph without nodes.

        Args:
            x: node features, ``(N, D)``.
            index: graph of each node, ``(N,)``, in any order.
            ptr: or the offsets of nodes that are sorted by graph, ``(B + 1,)``. With both, they must agree.
            dim_size: B.
            dim: -2, or 0 which is the same.
            max_num_elements: no graph may have more nodes than this; none is ever dropped.
            masses: of the nodes, ``(N,)``, not negative; None: all equal.
        """
        if dim not in (-2, 0):
            raise ValueError(f"dim is {dim}; pooling goes over the nodes of (num_nodes, {self.in_channels}): pass -2.")
        pooled = self.pooled(x, index, ptr, dim_size, masses)
        if not torch.compiler.is_compiling():  # a traced graph has no side effects: no report, and nothing to act on
            self._conclude(pooled)
        points = pooled.points.flatten(1)  # (B, M * D)
        if max_num_elements is not None:
            sizes = self.reduce(points.new_ones(x.shape[0], 1), index, ptr, dim_size, dim=0)
            if bool((sizes > max_num_elements).any()):
                raise ValueError(f"A graph has {int(sizes.max())} nodes; max_num_elements is {max_num_elements}.")
        if self.mass is not None:
            weights = points.new_ones(x.shape[0]) if masses is None else masses.to(points.dtype)
            size = self.reduce(weights.unsqueeze(-1), index, ptr, dim_size, dim=0)  # (B, 1)
            points = points * size if self.mass == "scale" else torch.cat([points, size], -1)
        return points.to(x.dtype)

    def pooled(
        self,
        x: Tensor,
        index: Tensor | None = None,
        ptr: Tensor | None = None,
        dim_size: int | None = None,
        masses: Tensor | None = None,
    ) -> Pooled:
        """The full record with plans and divergence, by :func:`flowpool.flow_pool` with this layer's settings."""
        # Not in half precision, in which two rows of the reference could be equal.
        dtype = torch.promote_types(self._checked(x).dtype, torch.float32)
        if isinstance(masses, Tensor):
            # Autocast, not the caller, chose the dtype of x; otherwise a difference is a mistake.
            if not (torch.is_autocast_enabled(x.device.type) and masses.is_floating_point()):
                require_like(masses, x, "masses")
            masses = masses.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            return flow_pool(
                x.to(dtype),
                index,
                ptr,
                reference=self.reference.to(dtype),
                masses=masses,
                dim_size=dim_size,
                cost=self.cost,
                epsilon=self.epsilon,
                relative=self.relative,
                **asdict(self.options),
            )

    def __repr__(self) -> str:
        settings = f"epsilon={self.epsilon:g}, cost={type(self.cost).__name__}, mass={self.mass!r}"
        return f"{type(self).__name__}({self.in_channels}, num_points={self.num_points}, {settings})"

    def _conclude(self, pooled: Pooled) -> None:
        """Keeps the report of a call and acts on graphs that were not pooled."""
        memory = self._memory
        memory.report = report = Report(
            pooled.status, pooled.converged, pooled.residual.detach(), pooled.steps, pooled.backward
        )
        if self.on_failure == "ignore" or bool(report.converged.all()):
            return
        failures = {s: _describe(report, s) for s in Status if not s.converged and report.graphs(s)}
        if self.on_failure == "raise":
            raise ArithmeticError("\n".join(failures.values()))
        for status, text in failures.items():
            if status not in memory.announced:
                memory.announced.add(status)
                warnings.warn(f"{text} This is said once; see the report of the layer.", RuntimeWarning, stacklevel=2)

    def _checked(self, x: Tensor) -> Tensor:
        check_features(x)
        if x.shape[1] != self.in_channels:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected (num_nodes, {self.in_channels}).")
        return x

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], strict: bool, *lists: list[str]
    ) -> None:
        found = local_metadata.get("version") or 1  # formats without metadata, like safetensors, do not say
        if found > self._version:
            lists[-1].append(
                f"{prefix}reference is of version {found}, this flowpool knows {self._version}: upgrade it."
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)

    def __prepare_scriptable__(self) -> NoReturn:
        raise TypeError("FlowPool does not support TorchScript; script the rest of the model.")


def initial_reference(reference: Literal["normal"] | Tensor, num_points: int, in_channels: int, seed: int) -> Tensor:
    """The reference that a layer starts with, ``(M, D)``: drawn, or a checked copy of the one given."""
    if isinstance(reference, str):
        if reference != "normal":
            raise ValueError(f"Unknown reference {reference!r}; pass 'normal' or a tensor (num_points, in_channels).")
        return references.normal(num_points, in_channels, seed)
    references.check(reference, in_channels)
    if reference.shape[0] != num_points:
        raise ValueError(f"reference has {reference.shape[0]} points, but num_points is {num_points}.")
    if reference.requires_grad:
        raise ValueError("reference requires a gradient, but none flows to it; pass reference.detach().")
    return reference.clone()


def _describe(report: Report, status: Status) -> str:
    graphs = report.graphs(status)
    first = ", ".join(map(str, graphs[:5])) + (", ..." if len(graphs) > 5 else "")
    return f"{len(graphs)} of {report.status.numel()} graphs are {status.name} (graph {first}). {status.advice}"


def register_with_pyg(num_points: int = 4) -> None:
    """Lets PyG find the layer by name: ``aggr="flowpool"`` with ``aggr_kwargs``, and in GraphGym.

    Args:
        num_points: M of GraphGym's ``graph_pooling: flowpool``. Its output has M times the width of the nodes, so that
            it needs a head of that width.
    """
    torch_geometric.nn.aggr.FlowPool = FlowPool

    @cache
    def layer(in_channels: int) -> FlowPool:
        return FlowPool(in_channels, num_points)

    def pool(x: Tensor, batch: Tensor, size: int | None = None) -> Tensor:
        result: Tensor = layer(x.shape[-1]).to(x.device)(x, batch, dim_size=size)
        return result

    with suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GraphGym complains at import about its own missing extras
        from torch_geometric.graphgym.register import pooling_dict

        pooling_dict["flowpool"] = pool
