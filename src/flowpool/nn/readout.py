"""The readout that we recommend: from node features to one vector per graph that a linear head can use.

Normalisation of the nodes; what each point receives of a graph, which forgets how many nodes there are; their sum and
number, which forget the shape of the cloud; and normalisation of all that, so that columns as different as a coordinate
and a count meet the head on one scale.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack, get_args

import torch
from torch import Tensor, nn
from torch_geometric.experimental import disable_dynamic_shapes
from torch_geometric.nn.inits import reset

from flowpool import costs
from flowpool.core.measures import Clouds
from flowpool.costs import Geometry
from flowpool.engines import choice
from flowpool.engines.devices import HOST, carried
from flowpool.inputs import check_choice, check_like, checked_epsilon, checked_point_masses
from flowpool.nn.base import PointAggregation, check_most, initial_reference
from flowpool.nn.norm import Norm, is_shared, normalised, share_statistics
from flowpool.nn.pool import FlowPool
from flowpool.nn.report import Report
from flowpool.options import FlowOptions, LayerOptions, takes_options
from flowpool.results import BackwardReport
from flowpool.status import Status
from flowpool.step.pool import Received, Step, precise_clouds, receive, without_broken
from flowpool.step.ragged import leaves_device, use_kernels

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which not every build of torch has

By = Literal["step", "flow"]
_STEP_OPTIONS = ("epsilon", "cost", "engine", "on_failure")  # what one step has a use for
_UNBALANCED = 1e-6  # error of the shares from which a step is said to have failed


@takes_options
class FlowReadout(PointAggregation):
    r"""A readout for classifiers: what M learned points receive of each graph, with the sum and the number of its nodes.

    It has a BatchNorm before and after the pool, so that a linear head can follow. The output is ``(B, out_channels)``.

    Args:
        in_channels: number of features, D.
        num_points: number of points, M.
        by: how M points represent the nodes. ``"step"``: one step towards each graph from a learned reference, in which
            every point receives 1/M of the graph (:func:`flowpool.transport_pool`). The output says how far each point
            moved, and the standard deviation of each feature within what it received. This tells shapes apart best and
            is the fastest. ``"flow"``: the points of the whole flow (:class:`flowpool.FlowPool`), closest to the nodes.
        size: ``"append"`` adds what a measure forgets, the sum of the nodes and their number, each node counted with its
            mass when masses are given; ``None`` leaves it out, so that a graph with every node doubled has the same row.
        reference: where learning starts, in units of the standard deviation of one feature: drawn points lie well
            inside the nodes, where none of them is lost. With ``"flow"`` as in :class:`flowpool.FlowPool`.
        seed: of the drawn reference.
        **options: those of :class:`flowpool.options.FlowOptions`.

    All options are for ``"flow"``. One step takes four of them: ``on_failure``; ``engine``; ``cost``, which must be squared
    Euclidean or a diagonal Mahalanobis cost; and ``epsilon``, in units of the sum of the variances not of each graph but
    of all nodes (D, after BatchNorm), since its reference is the same for all graphs.

    Nodes without mass, empty graphs, and graphs with NaN or infinite features do not count in the statistics of
    BatchNorm. A batch that is too small for statistics of its own (one graph, or one node) is normalised as in
    evaluation. ``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` makes processes share their statistics as usual; on the
    CPU, where DistributedDataParallel refuses converted modules, :meth:`share_statistics` does.
    """

    node_norm: nn.BatchNorm1d | nn.SyncBatchNorm
    output_norm: nn.BatchNorm1d | nn.SyncBatchNorm

    def __init__(
        self,
        in_channels: int,
        num_points: int,
        *,
        by: By = "step",
        size: Literal["append"] | None = "append",
        reference: Literal["normal"] | Tensor = "normal",
        seed: int = 0,
        **options: Unpack[FlowOptions],
    ) -> None:
        settings = LayerOptions(**options)
        super().__init__(in_channels, num_points, size, settings.on_failure)
        check_choice("by", by, get_args(By))
        check_choice("size", size, ("append", None))
        self.by = by
        self.node_norm = nn.BatchNorm1d(self.in_channels)
        if by == "flow":
            self.pool = FlowPool(self.in_channels, self.num_points, reference=reference, seed=seed, **options)
        else:
            useless = [name for name in options if name not in _STEP_OPTIONS]
            if useless:
                raise ValueError(f"{useless[0]} is an option of the flow; by={by!r} takes {', '.join(_STEP_OPTIONS)}.")
            self.epsilon, self.engine, self.cost = settings.epsilon, settings.engine, costs.resolve(settings.cost)
            costs.check_width(self.cost, self.in_channels)
            if not costs.is_weighing(self.cost):
                raise ValueError(
                    f"by={by!r} knows the squared Euclidean and the diagonal Mahalanobis cost, not {self.cost}; "
                    "pass by='flow' for any other."
                )
            self._initial = initial_reference(reference, self.in_channels, self.num_points, seed)
            self.reference = nn.Parameter(self._initial.clone())
        self.output_norm = nn.BatchNorm1d(self.out_channels)

    @property
    def out_channels(self) -> int:
        """Columns of the output."""
        rows = (2 * self.num_points if self.by == "step" else self.num_points) + (self.size is not None)
        return rows * self.in_channels + (self.size is not None)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Everything as it was made, without statistics."""
        self.node_norm.reset_parameters()
        self.output_norm.reset_parameters()
        if self.by == "flow":
            self.pool.reset_parameters()
        else:
            self.reference.copy_(self._initial)
            reset(self.cost)

    def share_statistics(self, process_group: ProcessGroup | None = None) -> None:
        """From now on the statistics of a batch are those of the batches of all processes together, on any device."""
        for norm in (self.node_norm, self.output_norm):
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
        if self.by == "flow":
            reference, cost = self.pool.reference, self.pool.cost
        else:
            reference, cost = self.reference, self.cost
        return _State(Norm.of(self.node_norm), Norm.of(self.output_norm), reference, costs.geometry_of(cost))

    def _leaves_device(self, x: Tensor) -> bool:
        """Whether all is computed on the CPU, by kernels, for tensors on another device."""
        if is_shared(self.node_norm) or is_shared(self.output_norm):
            return False  # the processes talk to each other about tensors on their devices
        if self.by == "flow":
            return self.pool._leaves_device(x)
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
        received, report = self._received(state, clouds, weights, broken, x.dtype)
        self._conclude(report, device)
        report = report.on(x.device)
        rows = self._columns(received, clouds, weights)  # (B, out_channels)
        counted = report.status != Status.EMPTY.value
        if not torch.compiler.is_compiling() and bool(report.converged.all()):
            return _normalised(state.output_norm, rows, counted, x.dtype).to(x.dtype)
        bad = ~(report.converged | (report.status == Status.MAX_STEPS.value))  # which are NaN, or overflowed
        rows = _normalised(state.output_norm, rows.masked_fill(bad[:, None], 0.0), counted & ~bad, x.dtype)
        return rows.masked_fill(bad[:, None], torch.nan).to(x.dtype)

    def _received(
        self, state: _State, clouds: Clouds, masses: Tensor | None, broken: Tensor | None, dtype: torch.dtype
    ) -> tuple[list[Tensor], Report]:
        """What is told of the points, each ``(B, M, D)``, and how that went.

        Args:
            clouds: normalised nodes, zeros in broken graphs.
            masses: of the nodes as they were given, in the order of the clouds.
            broken: which graphs are, ``(B,)`` bool; None: none.
            dtype: of the caller's features.
        """
        if self.by == "flow":
            # As precise as they were given, or the solver would take their rounding for differences of twins.
            dtype = torch.promote_types(dtype, torch.float32)
            nodes = clouds.nodes if broken is None else clouds.nodes.masked_fill(broken[clouds.batch, None], torch.nan)
            masses = None if masses is None else masses.to(dtype)
            pooled = self.pool._pooled(
                state.reference, state.geometry, nodes.to(dtype), None, clouds.ptr, clouds.num_graphs, masses
            )
            points = pooled.points.to(clouds.nodes.dtype)
            return [points], Report.of(pooled)
        level = self.epsilon * self.in_channels  # normalised nodes have variance one in each feature
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
        return (
            f"{type(self).__name__}({self.in_channels}, num_points={self.num_points}, by={self.by!r}, "
            f"size={self.size!r})"
        )


class _State(NamedTuple):
    """The tensors of a layer, or copies of them on the CPU."""

    node_norm: Norm
    output_norm: Norm
    reference: Tensor
    geometry: Geometry

    def to_host(self, *given: Any) -> tuple[list[Any], _State]:
        """Values of a caller, and these, on the CPU, by one copy."""
        (node_norm, *first), (output_norm, *second), reference, geometry = self
        found = carried([*given, reference, *first, *second, *geometry.tensors.values()], HOST)
        rest = iter(found[len(given) :])
        there = next(rest)
        nodes, output = (Norm(module, *islice(rest, len(first))) for module in (node_norm, output_norm))
        return found[: len(given)], _State(nodes, output, there, geometry.having(rest))

    def learned(self, there: _State, rows: Tensor) -> Tensor:
        """What was computed on the CPU, on the device of these; running statistics follow those of the copies."""
        own, changed = ([*state.node_norm.running, *state.output_norm.running] for state in (self, there))
        training = self.node_norm.module.training
        rows, *values = carried([rows, *(changed if training else ())], self.reference.device)
        with torch.no_grad():
            for running, value in zip(own if training else (), values, strict=True):
                running.copy_(value)
        return rows


def _normalised(norm: Norm, rows: Tensor, counted: Tensor | None, dtype: torch.dtype) -> Tensor:
    """BatchNorm of rows in the precision of the layer or of the caller's features, whichever is higher."""
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
