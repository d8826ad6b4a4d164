"""FlowPool as a layer: a PyTorch Geometric aggregation around :func:`flowpool.flow_pool`.

It stands wherever ``SortAggregation`` or ``global_mean_pool`` stood: as a global pool, as the ``aggr`` of a message
passing layer, as a member of a ``MultiAggregation``. TorchScript is not supported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch_geometric.experimental import disable_dynamic_shapes
from torch_geometric.nn.inits import reset

from flowpool import costs, references
from flowpool.core.updates import UpdateStep
from flowpool.inputs import check_epsilon, check_flag, check_like, checked_point_masses
from flowpool.nn.base import PointAggregation, check_most, graph_of_nodes, initial_reference
from flowpool.nn.report import Report
from flowpool.options import Engine, Gradient, OnFailure, Options, Size
from flowpool.pooling import flow_pool
from flowpool.results import Pooled


class FlowPool(PointAggregation):
    r"""The M points of each graph with the least Sinkhorn divergence to its node features, concatenated to one row.

    .. math:: X^* = \arg\min_X S_\varepsilon(X, Y), \quad \text{reached by the Wasserstein gradient flow from } X^{(0)}

    Args:
        in_channels: number of features, D.
        num_points: number of points, M.
        reference: X^(0): ``"normal"`` draws it with the seed; or a tensor ``(M, D)``. It is a buffer, not trained.
        seed: of the drawn reference, and of :meth:`fit_reference`.
        point_masses: a, how much of a graph each point represents, ``(M,)``, positive; None: equal. A buffer.
        size: a measure forgets the size of its graph. ``"append"`` adds it as a last column, ``"scale"`` multiplies
            X* by it; the size is the number of nodes, or the total of their masses when these are given.
        epsilon: entropic regularisation, a number > 0.
        learn_epsilon: trains epsilon, by its logarithm, from the value given.
        cost: ground cost, as in :func:`flowpool.flow_pool`. A module becomes a submodule, and its parameters are trained.
        relative, debias, gradient, tolerance, max_steps, step_size, update_step, ridge, engine: as in
            :func:`flowpool.flow_pool`.
        on_failure: for graphs that were not pooled to the tolerance: ``"ignore"``, ``"warn"`` (once for each kind of status,
            in the life of the layer), or ``"raise"`` an ArithmeticError. The report of the layer has them all.
    """

    _version = 1  # of the state_dict

    reference: Tensor
    point_masses: Tensor | None
    log_epsilon: nn.Parameter | None
    cost: costs.Cost

    def __init__(
        self,
        in_channels: int,
        num_points: int = 8,
        *,
        reference: Literal["normal"] | Tensor = "normal",
        seed: int = 0,
        point_masses: Tensor | None = None,
        size: Size | None = None,
        epsilon: float = 0.1,
        learn_epsilon: bool = False,
        relative: bool = True,
        cost: str | costs.CostFunction = "sqeuclidean",
        debias: bool = True,
        gradient: Gradient = "implicit",
        tolerance: float = 1e-5,
        max_steps: int = 1000,
        step_size: float | None = None,
        update_step: str | UpdateStep | None = None,
        ridge: float | None = None,
        engine: Engine = "auto",
        on_failure: OnFailure = "warn",
    ) -> None:
        super().__init__(in_channels, num_points, size, on_failure)
        check_epsilon(epsilon)
        check_flag("learn_epsilon", learn_epsilon)
        check_flag("relative", relative)
        self.options = Options(debias, gradient, tolerance, max_steps, step_size, update_step, ridge, engine)
        self.seed, self.relative = seed, relative
        self.cost = costs.resolve(cost)
        costs.check_width(self.cost, self.in_channels)
        self._epsilon = float(epsilon)
        learned = nn.Parameter(torch.tensor(math.log(self._epsilon))) if learn_epsilon else None
        self.register_parameter("log_epsilon", learned)
        self._initial = initial_reference(reference, self.in_channels, self.num_points, seed)
        self.register_buffer("reference", self._initial.clone())
        if point_masses is not None:
            if isinstance(point_masses, Tensor) and point_masses.requires_grad:
                raise ValueError("point_masses requires a gradient, but the layer keeps a copy; pass .detach().")
            point_masses = checked_point_masses(point_masses, self.num_points, self._initial)
        self.register_buffer("point_masses", point_masses)

    @property
    def epsilon(self) -> float | Tensor:
        """Entropic regularisation as it is now."""
        return self._epsilon if self.log_epsilon is None else self.log_epsilon.exp()

    @property
    def out_channels(self) -> int:
        """Columns of the output: M * D, and one more with ``size="append"``."""
        return self.num_points * self.in_channels + (self.size == "append")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The reference and the epsilon that the layer was made with, in place of others, and a fresh cost."""
        self.reference.copy_(self._initial)
        if self.log_epsilon is not None:
            self.log_epsilon.fill_(math.log(self._epsilon))
        reset(self.cost)

    @torch.no_grad()
    def fit_reference(self, source: Any) -> None:
        """Sets the reference to k-means centres of node features, where the flow then starts; needs scikit-learn.

        Args:
            source: node features ``(N, D)``, an object that has them as ``.x``, or an iterable of these, such as a
                ``DataLoader``. Behind a network: ``(network(data.x, data.edge_index) for data in loader)``.
        """
        items: Iterable[Any] = [source] if isinstance(source, Tensor) or hasattr(source, "x") else source
        batches = []
        for item in items:
            features = getattr(item, "x", item)
            self._check(features)
            batches.append(features.cpu().double())
        if not batches:
            raise ValueError("fit_reference found no features: the iterable is empty.")
        self.reference.copy_(references.kmeans(torch.cat(batches), self.num_points, self.seed, self.relative))

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
            dim_size: number of graphs, B.
            dim: -2, or 0 which is the same.
            max_num_elements: no graph may have more nodes than this; none is ever dropped.
            masses: of the nodes, ``(N,)``, not negative; None: all equal.
        """
        self._check_dim(dim)
        pooled = self.pooled(x, index, ptr, dim_size, masses)
        self._conclude(Report.of(pooled), x.device)
        points = pooled.points.flatten(1)  # (B, M * D)
        if self.size is not None or max_num_elements is not None:
            graph = graph_of_nodes(x, index, ptr)
            zeros, ones = points.new_zeros(points.shape[0]), points.new_ones(x.shape[0])
            check_most(zeros.index_add(0, graph, ones), max_num_elements)
            total = zeros.index_add(0, graph, ones if masses is None else masses.to(points.dtype)).unsqueeze(-1)
            if self.size is not None:
                points = points * total if self.size == "scale" else torch.cat([points, total], -1)
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
        self._check(x)
        dtype = torch.promote_types(x.dtype, torch.float32)
        if masses is not None:
            check_like(masses, x, "masses", "x")
            masses = masses.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            return flow_pool(
                x.to(dtype),
                index,
                ptr,
                reference=self.reference.to(dtype),
                masses=masses,
                point_masses=None if self.point_masses is None else self.point_masses.to(dtype),
                dim_size=dim_size,
                cost=self.cost,
                epsilon=self.epsilon,
                relative=self.relative,
                **vars(self.options),
                on_failure="ignore",  # the layer acts on its own report
            )

    def __repr__(self) -> str:
        epsilon = self._epsilon if self.log_epsilon is None else float(self.log_epsilon.detach().exp())
        settings = f"epsilon={epsilon:g}, cost={type(self.cost).__name__}, size={self.size!r}"
        return f"{type(self).__name__}({self.in_channels}, num_points={self.num_points}, {settings})"

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], strict: bool, *lists: list[str]
    ) -> None:
        found = local_metadata.get("version") or 1  # formats without metadata, like safetensors, do not say
        if found > self._version:
            lists[-1].append(
                f"{prefix}reference is of version {found}, this flowpool knows {self._version}: upgrade it."
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
