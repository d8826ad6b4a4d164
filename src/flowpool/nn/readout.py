"""The readout that we recommend: from node features to one vector per graph that a linear head can use.

Normalisation of the nodes; what each point receives of a graph, which forgets how many nodes there are; their sum and
number, which forget the shape of the cloud; and normalisation of all that, so that columns as different as a coordinate
and a count meet the head on one scale.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.experimental import disable_dynamic_shapes
from torch_geometric.nn.inits import reset

from flowpool import costs
from flowpool.core.measures import Clouds
from flowpool.costs import CostFunction, Geometry
from flowpool.engines import choice
from flowpool.engines.devices import HOST, carried
from flowpool.inputs import check_choice, check_like, check_number, checked_epsilon, checked_point_masses
from flowpool.nn.base import PointAggregation, check_most, initial_reference
from flowpool.nn.norm import Norm, is_shared, normalised, share_statistics
from flowpool.nn.report import Report
from flowpool.options import ENGINES, ON_FAILURE, Engine, OnFailure
from flowpool.results import BackwardReport
from flowpool.status import Status
from flowpool.step.pool import Received, Step, checked_cost, precise_clouds, receive, without_broken
from flowpool.step.ragged import leaves_device, use_kernels

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which not every build of torch has

_UNBALANCED = 1e-6  # error of the shares from which a step is said to have failed


class FlowReadout(PointAggregation):
    r"""A readout for classifiers: what M learned points receive of each graph, with the sum and the number of its nodes.

    Each graph takes one step towards a learned reference, in which every point receives 1/M of the graph
    (:func:`flowpool.transport_pool`). The output says how far each point moved, and the standard deviation of each feature
    within what it received. A BatchNorm stands before and after, so that a linear head can follow. The output is
    ``(B, out_channels)``.

    Args:
        in_channels: number of features, D.
        num_points: number of points, M.
        size: ``"append"`` adds what a measure forgets, the sum of the nodes and their number, each node counted with its
            mass when masses are given; ``None`` leaves it out, so that a graph with every node doubled has the same row.
        norm: ``"batch"``: a BatchNorm of the nodes before, and of the rows after. In training a graph then affects the
            others by way of the statistics of the batch. ``None``: no norm at all, and no graph affects another; the
            features should then be of order one.
        reference: where learning starts, in units of the standard deviation of one feature: drawn points lie well
            inside the nodes, where none of them is lost.
        seed: of the drawn reference.
        epsilon: entropic regularisation, in units of the sum of the variances not of each graph but of all nodes (D, after
            BatchNorm), since the reference is the same for all graphs.
        cost: ``"sqeuclidean"``, or a diagonal :class:`flowpool.costs.Mahalanobis`, whose weights are trained.
        engine: as in :func:`flowpool.transport_pool`.
        on_failure: for graphs that were not pooled: ``"ignore"``, ``"warn"`` (once for each kind of status, in the life of
            the layer), or ``"raise"`` an ArithmeticError. The report of the layer has them all.

    Nodes without mass, empty graphs, and graphs with NaN or infinite features do not count in the statistics of
    BatchNorm. A batch that is too small for statistics of its own (one graph, or one node) is normalised as in
    evaluation. ``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` makes processes share their statistics as usual; on the
    CPU, where DistributedDataParallel refuses converted modules, :meth:`share_statistics` does.
    """

    node_norm: nn.BatchNorm1d | nn.SyncBatchNorm | None
    output_norm: nn.BatchNorm1d | nn.SyncBatchNorm | None

    def __init__(
        self,
        in_channels: int,
        num_points: int = 8,
        *,
        size: Literal["append"] | None = "append",
        norm: Literal["batch"] | None = "batch",
        reference: Literal["normal"] | Tensor = "normal",
        seed: int = 0,
        epsilon: float = 0.1,
        cost: str | CostFunction = "sqeuclidean",
        engine: Engine = "auto",
        on_failure: OnFailure = "warn",
    ) -> None:
        super().__init__(in_channels, num_points, size, on_failure)
        check_choice("size", size, ("append", None))
        check_choice("norm", norm, ("batch", None))
        check_choice("engine", engine, ENGINES)
        check_choice("on_failure", on_failure, ON_FAILURE)
        self._initial = initial_reference(reference, self.in_channels, self.num_points, seed)
        check_number("epsilon", epsilon)
        self.epsilon = float(checked_epsilon(epsilon, 1, self._initial.double()))
        self.engine, self.cost = engine, checked_cost(cost, self.in_channels)
        self.reference = nn.Parameter(self._initial.clone())
        self.node_norm = nn.BatchNorm1d(self.in_channels) if norm else None
        self.output_norm = nn.BatchNorm1d(self.out_channels) if norm else None

    @property
    def out_channels(self) -> int:
        """Columns of the output."""
        rows = 2 * self.num_points + (self.size is not None)
        return rows * self.in_channels + (self.size is not None)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Everything as it was made, without statistics."""
        for norm in self._norms:
            norm.reset_parameters()
        self.reference.copy_(self._initial)
        reset(self.cost)

    @property
    def _norms(self) -> list[nn.BatchNorm1d | nn.SyncBatchNorm]:
        return [norm for norm in (self.node_norm, self.output_norm) if norm is not None]

    def share_statistics(self, process_group: ProcessGroup | None = None) -> None:
        """From now on the statistics of a batch are those of the batches of all processes together, on any device."""
        for norm in self._norms:
            share_statistics(norm, process_group)

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
        """One vector per graph, ``(B, out_channels)``; NaN for a graph with NaN or infinite features.

        Args:
            x: node features, ``(N, D)``.
            index: graph of each node, ``(N,)``, in any order.
            ptr: or the offsets of nodes that are sorted by graph, ``(B + 1,)``. With both, they must agree.
            dim_size: number of graphs, B.
            dim: -2, or 0 which is the same.
            max_num_elements: no graph may have more nodes than this; none is ever dropped.
            masses: of the nodes, ``(N,)``, not negative; None: all equal.
        """
        self._check(x)
        self._check_dim(dim)
        if masses is not None:
            check_like(masses, x, "masses", "x")
        state = self._state()
        if not self._leaves_device(x):
            return self._vectors(state, dim_size, max_num_elements, x.device, x, index, ptr, masses)
        choice.say_where(x.device)
        given, there = state.to_host(x, index, ptr, masses)
        rows = self._vectors(there, dim_size, max_num_elements, x.device, *given)
        return state.learned(there, rows)

    def _state(self) -> _State:
        nodes, output = (None if norm is None else Norm.of(norm) for norm in (self.node_norm, self.output_norm))
        return _State(nodes, output, self.reference, costs.geometry_of(self.cost))

    def _leaves_device(self, x: Tensor) -> bool:
        """Whether all is computed on the CPU, by kernels, for tensors on another device."""
        if any(is_shared(norm) for norm in self._norms):
            return False  # the processes talk to each other about tensors on their devices
        return leaves_device(self.engine, x)

    def _vectors(
        self,
        state: _State,
        dim_size: int | None,
        max_num_elements: int | None,
        device: torch.device,
        x: Tensor,
        index: Tensor | None,
        ptr: Tensor | None,
        masses: Tensor | None,
    ) -> Tensor:
        """:meth:`forward` where ``x`` and ``state`` are, with a report for a caller on a device."""
        clouds, order = precise_clouds(x, index, ptr, masses, dim_size)
        check_most(clouds.sizes, max_num_elements)
        weights = None if masses is None else masses.to(clouds.masses.dtype)[order]
        clouds, broken = without_broken(clouds)
        counted = None if broken is None else ~broken[clouds.batch]
        if weights is not None:
            counted = weights > 0 if counted is None else counted & (weights > 0)
        clouds = clouds.moved(_normalised(state.node_norm, clouds.nodes, counted, x.dtype))
        received, report = self._received(state, clouds, broken)
        self._conclude(report, device)
        report = report.on(x.device)
        rows = self._columns(received, clouds, weights)  # (B, out_channels)
        counted = report.status != Status.EMPTY.value
        if not torch.compiler.is_compiling() and bool(report.converged.all()):
            return _normalised(state.output_norm, rows, counted, x.dtype).to(x.dtype)
        bad = ~(report.converged | (report.status == Status.MAX_STEPS.value))  # which are NaN, or overflowed
        rows = _normalised(state.output_norm, rows.masked_fill(bad[:, None], 0.0), counted & ~bad, x.dtype)
        return rows.masked_fill(bad[:, None], torch.nan).to(x.dtype)

    def _received(self, state: _State, clouds: Clouds, broken: Tensor | None) -> tuple[list[Tensor], Report]:
        """What is told of the points, each ``(B, M, D)``, and how that went.

        Args:
            clouds: normalised nodes, zeros in broken graphs.
            broken: which graphs are, ``(B,)`` bool; None: none.
        """
        level = self.epsilon * self.in_channels  # nodes of variance one in each feature
        step = Step(
            state.reference.to(clouds.nodes.dtype),
            checked_point_masses(None, self.num_points, clouds.nodes),
            checked_epsilon(level, clouds.num_graphs, clouds.nodes),
            state.geometry.to(clouds.nodes.dtype, clouds.nodes.device).feature_weights,
            False,
            use_kernels(self.engine, clouds.nodes),
        )
        received = receive(clouds, step)
        moved = received.points - step.reference
        return [moved, received.deviations], _report_of_step(received, step, clouds, broken)

    def _columns(self, told: list[Tensor], clouds: Clouds, weights: Tensor | None) -> Tensor:
        """The vector before the last normalisation; weights of the nodes as they were given, None: all one."""
        columns = [values.flatten(1) for values in told]
        if self.size is not None:
            counts = torch.ones_like(clouds.masses) if weights is None else weights
            columns += [clouds.sum(counts.unsqueeze(-1) * clouds.nodes), clouds.sum(counts).unsqueeze(-1)]
        return torch.cat(columns, 1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, num_points={self.num_points}, size={self.size!r})"


class _State(NamedTuple):
    """The tensors of a layer, or copies of them on the CPU."""

    node_norm: Norm | None
    output_norm: Norm | None
    reference: Tensor
    geometry: Geometry

    def to_host(self, *given: Any) -> tuple[list[Any], _State]:
        """Values of a caller, and these, on the CPU, by one copy."""
        first, second, reference, geometry = self
        norms = [*(() if first is None else first[1:]), *(() if second is None else second[1:])]
        found = carried([*given, reference, *norms, *geometry.tensors.values()], HOST)
        rest = iter(found[len(given) :])
        there = next(rest)
        nodes, output = (
            None if norm is None else Norm(norm.module, *islice(rest, len(norm) - 1)) for norm in (first, second)
        )
        return found[: len(given)], _State(nodes, output, there, geometry.having(rest))

    def learned(self, there: _State, rows: Tensor) -> Tensor:
        """What was computed on the CPU, on the device of these; running statistics follow those of the copies."""
        norms = [state[:2] for state in (self, there)]
        own, changed = ([value for norm in pair if norm for value in norm.running] for pair in norms)
        training = self.node_norm is not None and self.node_norm.module.training
        rows, *values = carried([rows, *(changed if training else ())], self.reference.device)
        with torch.no_grad():
            for running, value in zip(own if training else (), values, strict=True):
                running.copy_(value)
        return rows


def _normalised(norm: Norm | None, rows: Tensor, counted: Tensor | None, dtype: torch.dtype) -> Tensor:
    """BatchNorm of rows in the precision of the layer or of the caller's features, whichever is higher."""
    if norm is None:
        return rows
    precision = torch.promote_types(dtype, norm.weight.dtype)
    return normalised(norm, rows.to(precision), counted).to(rows.dtype)


@torch.no_grad()
def _report_of_step(received: Received, step: Step, clouds: Clouds, broken: Tensor | None) -> Report:
    """How near the shares that the points received are to those that they were to receive."""
    empty = clouds.sizes == 0
    residual = (received.masses / step.shares - 1).abs().amax(1)
    residual = residual.masked_fill(empty, 0.0)
    status = (residual > _UNBALANCED) * Status.MAX_STEPS.value
    overflowed = received.points.isfinite().flatten(1).all(1).logical_not()
    status = status.masked_fill(overflowed, Status.NONFINITE.value).masked_fill(empty, Status.EMPTY.value)
    if broken is not None:
        status = status.masked_fill(broken, Status.NONFINITE_INPUT.value)
        residual = residual.masked_fill(broken, torch.nan)
    device = clouds.nodes.device
    return Report(
        status.to(torch.int8), residual, torch.ones_like(clouds.sizes), BackwardReport(device),
        f"{'compiled' if step.compiled else 'torch'} engine on {device}", _UNBALANCED,
    )  # fmt: skip
