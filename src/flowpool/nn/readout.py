"""The readout that we recommend: the sum of the nodes, and what the sum forgets.

A sum forgets the shape of the cloud. What each point of a learned reference receives knows it, in more numbers than a head
should have to sort; one linear map brings them to a few. A BatchNorm brings all columns to one scale, those of the shape to
a tenth of it, and training weighs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch_geometric.experimental import disable_dynamic_shapes
from torch_geometric.nn.inits import reset

from flowpool import costs
from flowpool.core.constants import UNBALANCED
from flowpool.costs import CostFunction
from flowpool.engines.devices import precision_on
from flowpool.inputs import check_choice, check_like, check_number, checked_count, checked_epsilon, may_look
from flowpool.nn.base import PointAggregation, check_most, initial_reference
from flowpool.nn.norm import normalised, norming_of, remember, share_statistics
from flowpool.nn.report import Report
from flowpool.options import ENGINES, Engine, OnFailure
from flowpool.results import BackwardReport
from flowpool.status import Status
from flowpool.step.pool import checked_cost, computable, graphs_of_nodes, largest
from flowpool.step.receive import MOVED, ROOTS, receive, use_kernels

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # which not every build of torch has


_START = 0.1  # weight of the shape at the beginning, where that of the sum is 1: see docs/readouts.md


class FlowReadout(PointAggregation):
    r"""A readout for graphs and sets: the sum and the number of the nodes, and beside them the shape of their cloud.

    Each graph takes one step towards a learned reference X, in which every one of its M points receives 1/M of the graph
    (:func:`flowpool.transport_pool`). Let :math:`y_j` be the nodes after a BatchNorm, :math:`m_i` how far the step moves point i,
    :math:`\sigma_i` the standard deviations of what it receives, and :math:`\bar m` the mean of the :math:`m_i`. Then a row is

    .. math::
        \mathrm{BatchNorm}\Bigl[\, \sum_j y_j,\; N,\; \sum_i U_i (m_i - \bar m) + V_i\, \sigma_i \Bigr]

    with learned maps U and V to K = ``shape_channels`` numbers: D + 1 + K columns. Moving a graph changes its sum and leaves its
    shape. The weights of the last BatchNorm start at 1 for the sum and the number and at 0.1 for the shape, so that a network
    begins with little more than a sum, and takes as much of the shape as training finds worth it.

    Args:
        in_channels: number of features, D.
        num_points: number of points, M.
        shape_channels: numbers that tell the shape of a graph, K.
        size: ``"append"``: the sum of the nodes and their number, each node counted with its mass when masses are given, stand
            beside the shape. ``None`` leaves them out, so that a graph with every node doubled has the same row; the mean
            of the graph then counts as a part of its shape.
        norm: ``"batch"``: a BatchNorm of the nodes before, and of the rows after. In training a graph then affects the
            others by way of the statistics of the batch. ``None``: no norm at all, and no graph affects another; the
            features should then be of order one.
        reference: where learning starts, in units of the standard deviation of one feature: drawn points lie well
            inside the nodes, where none of them is lost.
        seed: of the drawn reference and of the map.
        epsilon: entropic regularisation, in units of the sum of the variances not of each graph but of all nodes (D, after
            BatchNorm), since the reference is the same for all graphs.
        cost: ``"sqeuclidean"``, or a diagonal :class:`flowpool.costs.Mahalanobis`, whose weights are trained.
        engine: as in :func:`flowpool.transport_pool`.
        on_failure: for graphs that were not pooled: ``"ignore"``, ``"warn"`` (once for each kind of status, in the life of
            the layer), or ``"raise"`` an ArithmeticError. The report of the layer has them all.

    What it costs, and when a sum does as well, stands in ``docs/readouts.md``: forward and backward 8 to 15 times a sum, 2.5 to
    4.2 times sum, mean and max, 0.2 to 0.6 times GMT; a training step with it behind three layers of a GIN 2.4 to 2.9 times
    one with sums. Its parameters are ``2 K M D + M D`` besides those of its norms.

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
        shape_channels: int = 64,
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
        self.shape_channels = checked_count("shape_channels", shape_channels)
        self._initial = initial_reference(reference, self.in_channels, self.num_points, seed)
        check_number("epsilon", epsilon)
        self.epsilon = float(checked_epsilon(epsilon, 1, self._initial.double()))
        self.engine, self.cost = engine, checked_cost(cost, self.in_channels)
        self.seed = seed
        self.reference = nn.Parameter(torch.empty_like(self._initial))
        self.shape_map = nn.Parameter(
            self._initial.new_empty(self.shape_channels, 2, self.num_points, self.in_channels)
        )
        self.node_norm = nn.BatchNorm1d(self.in_channels) if norm else None
        self.output_norm = nn.BatchNorm1d(self.out_channels) if norm else None
        self._begin()

    @property
    def out_channels(self) -> int:
        """Columns of the output."""
        return self.shape_channels + (self.in_channels + 1 if self.size else 0)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Everything as it was made, without statistics."""
        for norm in self._norms:
            norm.reset_parameters()
        reset(self.cost)
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        """Parameters as drawn, with little weight for the shape."""
        self.reference.copy_(self._initial)
        bound = self.shape_map[0].numel() ** -0.5
        generator = torch.Generator().manual_seed(self.seed ^ 1)  # not the draw of the reference
        self.shape_map.copy_(torch.empty(self.shape_map.shape).uniform_(-bound, bound, generator=generator))
        if self.size is not None:
            shape = self.shape_map if self.output_norm is None else self.output_norm.weight[-self.shape_channels :]
            shape.mul_(_START)

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
            masses = masses.to(x.dtype)
        ptr, graph = graphs_of_nodes(x, index, ptr, masses, dim_size)
        if max_num_elements is not None:
            check_most(ptr.diff(), max_num_elements)
        compiled, num_graphs = use_kernels(self.engine, x), len(ptr) - 1
        precision = precision_on(x.device)
        told = receive(
            *computable(x, masses),
            self.reference,
            self.reference.new_full((self.num_points,), 1 / self.num_points, dtype=precision),
            self.reference.new_full((num_graphs,), self.epsilon * self.in_channels, dtype=precision),
            None if isinstance(self.cost, costs.SquaredEuclidean) else costs.geometry_of(self.cost).feature_weights,
            graph,
            ptr,
            norming=None if self.node_norm is None else norming_of(self.node_norm),
            switches=MOVED | ROOTS,
            compiled=compiled,
            limit=largest(self.reference.dtype),
        )
        if self.node_norm is not None and self.node_norm.training:
            remember(self.node_norm, *told.statistics)
        where = f"{'compiled' if compiled else 'torch'} engine on {x.device}"
        steps = torch.ones_like(told.status, dtype=torch.long)
        self._conclude(Report(told.status, told.error, steps, BackwardReport(x.device), where, UNBALANCED), x.device)
        return self._finished(told.rows, told.status).to(x.dtype)

    def _finished(self, told: Tensor, status: Tensor) -> Tensor:
        """The output; empty and broken graphs do not count in the statistics, and broken ones touch no gradient."""
        if may_look(told) and not bool(status.any()):
            return self._normed(self._columns(told), None)
        bad = (status == Status.NONFINITE_INPUT.value) | (status == Status.NONFINITE.value)
        counted = ~bad & (status != Status.EMPTY.value)
        rows = self._normed(self._columns(told.masked_fill(bad[:, None], 0.0)), counted)
        return rows.masked_fill(bad[:, None], torch.nan)

    def _columns(self, told: Tensor) -> Tensor:
        """Sum, number, and the map of what the points received, ``(B, out_channels)``, before the last norm."""
        told = told.to(torch.promote_types(told.dtype, self.shape_map.dtype))
        moved, deviations, base = told.split([self.reference.numel(), self.reference.numel(), self.in_channels + 1], 1)
        to_moved, to_deviations = self.shape_map.to(told.dtype).flatten(2).unbind(1)  # U and V, (K, M D)
        if self.size is not None:  # the sum knows the mean of a graph, which is the mean of what its points receive
            moved = moved.unflatten(1, self.reference.shape)  # (B, M, D)
            moved = (moved - moved.mean(1, keepdim=True)).flatten(1)
        with torch.autocast(told.device.type, enabled=False):  # as exact as the layer, like all before it
            shape = torch.addmm(moved @ to_moved.mT, deviations, to_deviations.mT)
        return torch.cat([base, shape], 1) if self.size is not None else shape

    def _normed(self, rows: Tensor, counted: Tensor | None) -> Tensor:
        return rows if self.output_norm is None else normalised(self.output_norm, rows, counted)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.in_channels}, num_points={self.num_points}, "
            f"shape_channels={self.shape_channels}, size={self.size!r})"
        )
