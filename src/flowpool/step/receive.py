"""What each point receives of each graph, as one differentiable function: by kernels, or by torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flowpool.core.once import refuse_second_derivatives
from flowpool.engines.choice import say_once
from flowpool.engines.devices import opaque, precision_on
from flowpool.kernels.errors import KernelError
from flowpool.options import Engine
from flowpool.step import in_torch
from flowpool.step.in_torch import FREE, MOVED, RELATIVE, ROOTS

__all__ = ["FREE", "MOVED", "RELATIVE", "ROOTS", "Norming", "Told", "receive", "use_kernels"]

_broken: list[str] = []  # why kernels cannot be used in this process, once that is known


class Norming(NamedTuple):
    """A BatchNorm of the nodes, with the statistics of the batch or with those that it has learned."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    variance: Tensor
    epsilon: float
    own: bool  # statistics of the batch, if it has two rows that count
    group: Any = None  # of processes that share statistics; False: none do


class Told(NamedTuple):
    """Of B graphs.

    Attributes:
        rows: mean and variances (or deviations) of what each point received, sum of the nodes, their number,
            ``(B, 2 M D + D + 1)``.
        received: share of the graph that each point received, ``(B, M)``.
        status: ``(B,)`` int8.
        error: the largest relative error of a share, ``(B,)``.
        statistics: number, mean and variance of the nodes that count, ``(3, D)``.
    """

    rows: Tensor
    received: Tensor
    status: Tensor
    error: Tensor
    statistics: Tensor


def use_kernels(engine: Engine, nodes: Tensor) -> bool:
    """Whether kernels compute; an error if they are asked for and cannot. Where not, torch computes the same."""
    if engine == "torch" or engine == "auto" and nodes.device.type != "cpu":
        return False
    obstacle = f"it runs on the CPU, the nodes are on {nodes.device}" if nodes.device.type != "cpu" else _obstacle()
    if engine == "compiled" and obstacle:
        raise ValueError(f"The compiled engine cannot be used: {obstacle}. Pass engine='torch' or 'auto'.")
    return obstacle is None


@torch.compiler.assume_constant_result
def _obstacle() -> str | None:
    if not _broken:
        try:
            import flowpool.step.receive_kernels  # noqa: F401
        except Exception as error:  # noqa: BLE001 - a broken numba may raise anything at import
            _broken.append(f"numba cannot be used ({type(error).__name__}: {error})")
    return _broken[0] if _broken else None


def receive(
    nodes: Tensor, masses: Tensor | None, reference: Tensor, shares: Tensor, epsilon: Tensor, weights: Tensor | None,
    graph: Tensor, ptr: Tensor, *, norming: Norming | None = None, switches: int, compiled: bool, limit: float,
) -> Told:  # fmt: skip
    """What each point of a reference receives of the nodes of each graph.

    Args:
        nodes: ``(N, D)``, in any order.
        masses: as given, ``(N,)``; None: all one.
        reference: ``(M, D)``.
        shares: a, ``(M,)``, summing to one.
        epsilon: ``(B,)``.
        weights: w, ``(D,)``, of the cost ``|w (x - y)|^2``; None: all one.
        graph, ptr: graph of each node, ``(N,)``, and the offsets of the graphs once nodes are sorted, ``(B + 1,)``.
        switches: of FREE (points receive what is near them), RELATIVE (the reference is in units of each graph),
            MOVED (means are told as differences to the reference), ROOTS (deviations are told, and no variances).
        compiled: by kernels.
        limit: features of a larger size cannot be used.
    """
    squared = torch.ones_like(reference[0]) if weights is None else weights.square()
    rest = (None,) * 4 if norming is None else norming[:4]
    how = (switches, compiled, limit, norming and norming[4:])
    return Told(*_Receive.apply(nodes, masses, reference, shares, epsilon, squared, *rest, graph, ptr, how))


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, nodes: Tensor, masses: Tensor | None, reference: Tensor, shares: Tensor, epsilon: Tensor, squared: Tensor,
        weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, variance: Tensor | None, graph: Tensor,
        ptr: Tensor, how: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        switches, compiled, limit, norm = how
        precision, dtype = precision_on(nodes.device), nodes.dtype
        if compiled:
            order, status, statistics = survey_by_kernels(nodes, masses, graph, ptr, limit)
        else:
            nodes, masses = nodes.to(precision), None if masses is None else masses.to(precision)
            order = graph  # any order will do
            status, statistics = in_torch.survey(nodes, masses, graph, len(epsilon), limit)
        if norm is not None and norm[1] and norm[2] is not False:
            statistics = _of_all(statistics, norm[2])
        table = _table(statistics, squared, weight, bias, mean, variance, *((0.0, False) if norm is None else norm[:2]))
        precise = (value.to(precision) for value in (reference, shares, epsilon))
        given = (nodes, masses, *precise, table, graph, ptr, order, status, switches)
        rows, found, portions, ended, error = receive_by_kernels(*given) if compiled else _receive_in_torch(*given)
        ctx.save_for_backward(*given[:-1], found, portions, statistics)
        ctx.how = how
        ctx.mark_non_differentiable(ended, error, statistics)
        ctx.set_materialize_grads(False)
        return rows.to(dtype), found[:, -len(reference) :].to(dtype, copy=True), ended, error, statistics

    @staticmethod
    def backward(
        ctx: Any, upstream: Tensor | None, upstream_masses: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        *given, found, portions, statistics = ctx.saved_tensors
        nodes, masses, reference, _, epsilon, table, graph, _, _, status = given
        switches, compiled, _, norm = ctx.how
        (points, dim), graphs = reference.shape, len(epsilon)
        if upstream is None:
            upstream = table.new_zeros(graphs, 2 * points * dim + dim + 1)
        upstream_masses = table.new_zeros(graphs, points) if upstream_masses is None else upstream_masses.to(table)
        back = (*given, switches, ctx.needs_input_grad[1], found, portions, upstream.to(table), upstream_masses)
        to_nodes, to_masses, shared = adjoint_by_kernels(*back) if compiled else _adjoint_in_torch(*back)
        parts = shared.sum(0).split([points * dim, points, dim, dim, dim, 1])
        to_reference, to_shares, to_squared, by_factor, by_bias, _ = parts
        if norm is not None and norm[1]:  # by way of the mean and the variance of the batch
            sums = torch.cat([by_bias, by_factor])
            if norm[2] is not False:
                dist.all_reduce(sums, group=norm[2])
            less = less_by_kernels if compiled else in_torch.less
            to_nodes = less(to_nodes, nodes, masses, graph, status, table, sums, statistics)
        return (
            to_nodes, to_masses if ctx.needs_input_grad[1] else None, to_reference.view(points, dim), to_shares,
            shared[:, -1], to_squared, None if norm is None else by_factor * table[4], None if norm is None else by_bias,
            *(None,) * 5,
        )  # fmt: skip


def _of_all(statistics: Tensor, group: Any) -> Tensor:
    """The statistics of all processes of a group."""
    number, mean, variance = statistics
    total = torch.stack([number, number * mean])
    dist.all_reduce(total, group=group)
    middle = total[1] / total[0].clamp(min=1)
    squares = number * (variance + (mean - middle).square())
    dist.all_reduce(squares, group=group)
    return torch.stack([total[0], middle, squares / total[0].clamp(min=1)])


def _table(
    statistics: Tensor, squared: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None,
    variance: Tensor | None, epsilon: float, own: bool,
) -> Tensor:  # fmt: skip
    """How each feature is normed and how it counts in the cost, ``(5, D)``.

    What is taken off, a factor, what is put back, the square of the weight, and the inverse deviation.
    """
    squared = squared.to(statistics)
    if weight is None or bias is None or mean is None or variance is None:
        nothing, one = torch.zeros_like(squared), torch.ones_like(squared)
        return torch.stack([nothing, one, nothing, squared, one])
    if own:
        enough = statistics[0] >= 2
        mean, variance = torch.where(enough, statistics[1], mean), torch.where(enough, statistics[2], variance)
    inverse = (variance.to(statistics) + epsilon).rsqrt()
    return torch.stack([mean.to(statistics), weight * inverse, bias.to(statistics), squared, inverse])


def _receive_in_torch(*given: Any) -> tuple[Tensor, ...]:
    return in_torch.receive(*(*given[:7], *given[9:]))


def _adjoint_in_torch(*given: Any) -> tuple[Tensor, ...]:
    return in_torch.adjoint(*(*given[:7], given[10], *given[12:]))


# By kernels: operators for graphs that are being traced, functions elsewhere. Where kernels fail, torch takes over.


def _arrays(*tensors: Tensor) -> list[Any]:
    """The tensors as C-contiguous arrays, which is what kernels read."""
    return [(tensor.detach() if tensor.requires_grad else tensor).contiguous().numpy() for tensor in tensors]


def _or_none(masses: Tensor | None, nodes: Tensor) -> Tensor:
    return nodes.new_empty(0) if masses is None else masses


def _give_up(error: KernelError) -> None:
    if not _broken:
        _broken.append(str(error))
    say_once(f"{error}: torch computes the same, more slowly.")


def _survey_shapes(
    nodes: Tensor, masses: Tensor | None, graph: Tensor, ptr: Tensor, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    status = nodes.new_empty(ptr.shape[0] - 1, dtype=torch.int8)
    return graph.new_empty(graph.shape), status, nodes.new_empty(3, nodes.shape[1], dtype=torch.float64)


@opaque(_survey_shapes)
def survey_by_kernels(
    nodes: Tensor, masses: Tensor | None, graph: Tensor, ptr: Tensor, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The order that sorts the nodes by graph, and :func:`flowpool.step.in_torch.survey`."""
    if not _broken:
        from flowpool.step import receive_kernels as kernels

        filled = _survey_shapes(nodes, masses, graph, ptr, limit)
        try:
            kernels.survey(*_arrays(nodes, graph, _or_none(masses, nodes)), limit, *_arrays(ptr, *filled))
            return filled
        except KernelError as error:
            _give_up(error)
    precise = None if masses is None else masses.double()
    return graph.argsort(stable=True), *in_torch.survey(nodes.double(), precise, graph, len(ptr) - 1, limit)


def _shapes(
    nodes: Tensor, masses: Tensor | None, reference: Tensor, shares: Tensor, epsilon: Tensor, table: Tensor, graph: Tensor,
    ptr: Tensor, order: Tensor, status: Tensor, switches: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    graphs, (points, dim) = ptr.shape[0] - 1, reference.shape
    room = 8 * (nodes.shape[0] // 8 + ptr.shape[0]) * points  # each graph is filled up to whole lanes
    return (
        table.new_empty(graphs, 2 * points * dim + dim + 1), table.new_empty(graphs, 2 * points * dim + points),
        table.new_empty(room), status.new_empty(graphs), table.new_empty(graphs),
    )  # fmt: skip


@opaque(_shapes)
def receive_by_kernels(
    nodes: Tensor, masses: Tensor | None, reference: Tensor, shares: Tensor, epsilon: Tensor, table: Tensor, graph: Tensor,
    ptr: Tensor, order: Tensor, status: Tensor, switches: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """:func:`flowpool.step.in_torch.receive`, but for how the portions are kept."""
    filled = _shapes(nodes, masses, reference, shares, epsilon, table, graph, ptr, order, status, switches)
    portions, ended = filled[2:4]
    if not _broken:
        from flowpool.step import receive_kernels as kernels

        ended.copy_(status)
        given = _arrays(nodes, order, _or_none(masses, nodes), ptr, reference, shares, epsilon, table)
        try:
            kernels.receive(given, switches, tuple(_arrays(*filled)), torch.get_num_threads())
            return filled
        except KernelError as problem:
            _give_up(problem)
    nodes, masses = nodes.double(), None if masses is None else masses.double()
    again = (nodes, masses, reference, shares, epsilon, table, graph, status, switches)
    rows, found, _, ended, error = in_torch.receive(*again)
    return rows, found, portions, ended, error


def _adjoint_shapes(
    nodes: Tensor, masses: Tensor | None, reference: Tensor, shares: Tensor, epsilon: Tensor, table: Tensor, graph: Tensor,
    ptr: Tensor, order: Tensor, status: Tensor, switches: int, to_masses: bool, found: Tensor, portions: Tensor,
    upstream: Tensor, upstream_masses: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    points, dim = reference.shape
    shared = table.new_empty(ptr.shape[0] - 1, points * dim + points + 3 * dim + 1)
    return nodes.new_empty(nodes.shape), nodes.new_empty(nodes.shape[0] if to_masses else 0), shared


@opaque(_adjoint_shapes)
def adjoint_by_kernels(
    nodes: Tensor, masses: Tensor | None, reference: Tensor, shares: Tensor, epsilon: Tensor, table: Tensor, graph: Tensor,
    ptr: Tensor, order: Tensor, status: Tensor, switches: int, to_masses: bool, found: Tensor, portions: Tensor,
    upstream: Tensor, upstream_masses: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """:func:`flowpool.step.in_torch.adjoint`; nothing for the masses unless that is asked for."""
    if not _broken:
        from flowpool.step import receive_kernels as kernels

        filled = _adjoint_shapes(
            nodes, masses, reference, shares, epsilon, table, graph, ptr, order, status, switches, to_masses, found,
            portions, upstream, upstream_masses,
        )  # fmt: skip
        given = _arrays(nodes, order, _or_none(masses, nodes), ptr, reference, shares, epsilon, table)
        kept, back = tuple(_arrays(found, portions)), tuple(_arrays(upstream, upstream_masses))
        try:
            kernels.adjoint(given, switches, kept, back, tuple(_arrays(*filled)), torch.get_num_threads())
            return filled
        except KernelError as error:
            _give_up(error)
    precise, weighed = nodes.double(), None if masses is None else masses.double()
    again = (precise, weighed, reference, shares, epsilon, table, graph)
    _, found, portions, _, _ = in_torch.receive(*again, status, switches)
    in_nodes, in_masses, shared = in_torch.adjoint(*again, switches, found, portions, upstream, upstream_masses)
    return in_nodes.to(nodes), in_masses.to(nodes) if to_masses else nodes.new_empty(0), shared


@opaque(lambda gradient, nodes, masses, graph, status, table, sums, statistics: gradient.new_empty(gradient.shape))
def less_by_kernels(
    gradient: Tensor, nodes: Tensor, masses: Tensor | None, graph: Tensor, status: Tensor, table: Tensor, sums: Tensor,
    statistics: Tensor,
) -> Tensor:  # fmt: skip
    """:func:`flowpool.step.in_torch.less`."""
    if not _broken:
        from flowpool.step import receive_kernels as kernels

        result = gradient.new_empty(gradient.shape)
        given = _arrays(gradient, nodes, _or_none(masses, nodes), graph, status, table, sums, statistics, result)
        try:
            kernels.leave_norm(*given)
            return result
        except KernelError as error:
            _give_up(error)
    return in_torch.less(gradient, nodes, masses, graph, status, table, sums, statistics)
