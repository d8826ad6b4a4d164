"""What the aggregations of this package share: their input, their report, and the words of their errors."""

from __future__ import annotations

from typing import Any, Literal, NoReturn, cast

import torch
from torch import Tensor, nn
from torch_geometric.nn.aggr import Aggregation

from flowpool import references
from flowpool.core.measures import wrong_ids
from flowpool.inputs import check_choice, check_plain, checked_count
from flowpool.nn.report import Memory, Report
from flowpool.options import ON_FAILURE, SIZES, OnFailure, Size


class PointAggregation(Aggregation):
    """An aggregation of nodes ``(N, in_channels)`` by way of ``num_points`` points per graph."""

    def __init__(self, in_channels: int, num_points: int, size: Size | None, on_failure: OnFailure) -> None:
        super().__init__()
        self.in_channels = checked_count("in_channels", in_channels)
        self.num_points = checked_count("num_points", num_points)
        check_choice("size", size, (None, *SIZES))
        check_choice("on_failure", on_failure, ON_FAILURE)
        self.size, self.on_failure = size, on_failure
        self._memory = Memory()

    @property
    def report(self) -> Report:
        """How well the last call in this thread went; a RuntimeError before the first one."""
        return self._memory.report

    def __call__(
        self, x: Tensor, index: Tensor | None = None, ptr: Tensor | None = None, *rest: Any, **more: Any
    ) -> Tensor:
        # Not by way of Aggregation, which computes with the index before anyone has looked at it.
        if isinstance(ptr, int):
            raise TypeError(f"ptr is {ptr}; pass the number of graphs by name: dim_size={ptr}.")
        if "batch" in more:
            raise TypeError(
                "Aggregations of PyTorch Geometric call the graph of each node index: pass it second, or index=batch."
            )
        try:
            return cast(Tensor, nn.Module.__call__(self, x, index, ptr, *rest, **more))
        except ValueError as error:
            if (sentence := getattr(error, "about_ids", None)) is None:
                raise
            raise wrong_ids(sentence, "index") from None

    def _conclude(self, report: Report, device: torch.device) -> None:
        """Keeps the report of a call with tensors on a device, and acts on graphs that were not pooled."""
        if not torch.compiler.is_compiling():  # a traced graph has no side effects: no report, and nothing to act on
            # To look at a status on a device is to wait for it: for an error, but not for a warning.
            waits = report.status.device.type != "cpu" and self.on_failure != "raise"
            self._memory.conclude(report, device, "ignore" if waits else self.on_failure)

    def _check(self, x: Tensor) -> None:
        """Raises unless ``x`` is what this layer was made for."""
        if not isinstance(x, Tensor):
            raise TypeError(f"x is a {type(x).__name__}; pass a torch.Tensor of shape (num_nodes, {self.in_channels}).")
        if x.dim() != 2 or x.shape[1] != self.in_channels:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected (num_nodes, {self.in_channels}).")
        if not x.is_floating_point():
            raise TypeError(f"x has dtype {x.dtype}; pooling needs real numbers: pass x.float().")
        check_plain(x)

    def _check_dim(self, dim: int) -> None:
        if dim not in (-2, 0):
            raise ValueError(f"dim is {dim}; pooling goes over the nodes of (num_nodes, {self.in_channels}): pass -2.")

    def __prepare_scriptable__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} does not support TorchScript; script the rest of the model.")


def graph_of_nodes(x: Tensor, index: Tensor | None, ptr: Tensor | None) -> Tensor:
    """Graph of each node, ``(N,)``, from an index or offsets that have been checked, or zeros from neither."""
    if index is not None:
        return index.to(device=x.device, dtype=torch.long)
    if ptr is None:
        return torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
    offsets = ptr.to(x.device)
    graphs = torch.arange(offsets.numel() - 1, device=x.device)
    return graphs.repeat_interleave(offsets.diff(), output_size=x.shape[0])


def check_most(num_nodes: Tensor, max_num_elements: int | None) -> None:
    """Raises if a graph has more nodes than PyG's ``max_num_elements`` allows, given their numbers ``(B,)``."""
    if max_num_elements is not None and bool((num_nodes > max_num_elements).any()):
        raise ValueError(f"A graph has {int(num_nodes.max())} nodes; max_num_elements is {max_num_elements}.")


def initial_reference(reference: Literal["normal"] | Tensor, in_channels: int, num_points: int, seed: int) -> Tensor:
    """The reference that a layer starts with, ``(M, D)``: drawn, or a checked copy of the one given."""
    if isinstance(reference, str):
        if reference != "normal":
            raise ValueError(f"Unknown reference {reference!r}; pass 'normal' or a tensor (num_points, in_channels).")
        return references.normal(in_channels, num_points, seed)
    references.check(reference, in_channels)
    if reference.shape[0] != num_points:
        raise ValueError(f"reference has {reference.shape[0]} points, but num_points is {num_points}.")
    if reference.requires_grad:
        raise ValueError("reference requires a gradient, but the layer keeps a copy; pass reference.detach().")
    return reference.clone()
