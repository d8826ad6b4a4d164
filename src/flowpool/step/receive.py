"""What each point receives of each graph, as one differentiable function: by kernels, or by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flowpool.core.once import refuse_second_derivatives
from flowpool.engines.choice import say_once
from flowpool.engines.devices import opaque, precision_on
from flowpool.kernels.errors import KernelError
from flowpool.options import Engine
from flowpool.status import Status
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
        if not compiled:
            nodes, masses = nodes.to(precision), None if masses is None else masses.to(precision)
        order, status, statistics = survey(nodes, masses, graph, ptr, limit, compiled)
        squared = squared.to(precision)
        inverse = torch.zeros_like(squared)
        if weight is None or norm is None:
            table = torch.stack([inverse, torch.ones_like(squared), inverse, squared])
        else:
            middle, inverse, statistics = _statistics(statistics, mean, variance, norm)
            table = torch.stack([middle, weight.to(precision) * inverse, bias.to(precision), squared])  # type: ignore[union-attr]
        given = (
            nodes,
            masses,
            *(value.to(precision) for value in (reference, shares, epsilon)),
            table,
            graph,
            ptr,
            order,
        )
        rows, found, portions, ended, error = by(compiled)[0](*given, status, switches)
        ctx.save_for_backward(*given, status, found, portions, inverse, statistics)
        ctx.how, ctx.dtypes = how, [reference.dtype, shares.dtype, epsilon.dtype, squared.dtype]
        ctx.mark_non_differentiable(ended, error, statistics)
        ctx.set_materialize_grads(False)
        received = found[:, -reference.shape[0] :]
        return rows.to(dtype), received.to(dtype, copy=True), ended, error, statistics

    @staticmethod
    def backward(
        ctx: Any, upstream: Tensor | None, upstream_masses: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        *given, status, found, portions, inverse, statistics = ctx.saved_tensors
        (switches, compiled, _, norm), (nodes, masses, reference, _, epsilon, table, graph, *_) = ctx.how, given
        (points, dim), graphs = reference.shape, len(epsilon)
        if upstream is None:
            upstream = table.new_zeros(graphs, 2 * points * dim + dim + 1)
        if upstream_masses is None:
            upstream_masses = table.new_zeros(graphs, points)
        to_nodes, to_masses, *shared, by_factor, by_bias, to_epsilon = by(compiled)[1](
            *given,
            status,
            switches,
            ctx.needs_input_grad[1],
            found,
            portions,
            upstream.to(table),
            upstream_masses.to(table),
        )
        to_weight = by_factor * inverse
        if norm is not None and norm[1]:
            to_nodes = to_nodes + _through_statistics(
                nodes, masses, graph, status, table, inverse, statistics, by_factor, by_bias, norm
            )
        gradients = [to_nodes, to_masses, *shared[:2], to_epsilon, shared[2], to_weight, by_bias]
        wanted = zip(gradients, ctx.needs_input_grad, strict=False)
        return (*(value if needed else None for value, needed in wanted), *(None,) * 5)


def _statistics(statistics: Tensor, mean: Any, variance: Any, norm: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Mean that is taken off, inverse deviation, and the statistics, those of all processes where they are shared."""
    epsilon, own, group = norm
    middle, spread = mean.to(statistics), variance.to(statistics)
    if own:
        if group is not False:
            statistics = _of_all(statistics, group)
        enough = statistics[0] >= 2
        middle, spread = torch.where(enough, statistics[1], middle), torch.where(enough, statistics[2], spread)
    return middle, (spread + epsilon).rsqrt(), statistics


def _of_all(statistics: Tensor, group: Any) -> Tensor:
    number, mean, variance = statistics
    total = torch.stack([number, number * mean])
    dist.all_reduce(total, group=group)
    middle = total[1] / total[0].clamp(min=1)
    squares = number * (variance + (mean - middle).square())
    dist.all_reduce(squares, group=group)
    return torch.stack([total[0], middle, squares / total[0].clamp(min=1)])


def _through_statistics(
    nodes: Tensor, masses: Tensor | None, graph: Tensor, status: Tensor, table: Tensor, inverse: Tensor,
    statistics: Tensor, by_factor: Tensor, by_bias: Tensor, norm: tuple[Any, ...],
) -> Tensor:  # fmt: skip
    """Gradient that reaches the nodes by way of the mean and the variance of the batch."""
    sums = torch.stack([by_bias, by_factor * inverse.square()])
    if norm[2] is not False:
        dist.all_reduce(sums, group=norm[2])
    number = statistics[0]
    slopes = -table[1] * sums / number.clamp(min=1) * (number >= 2)
    counts = status[graph] == Status.OK.value
    if masses is not None:
        counts = counts & (masses > 0)
    return torch.where(counts.unsqueeze(-1), slopes[0] + slopes[1] * (nodes - table[0]), 0.0).to(nodes.dtype)


def survey(
    nodes: Tensor, masses: Tensor | None, graph: Tensor, ptr: Tensor, limit: float, compiled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The order that sorts the nodes by graph, the statuses of the graphs before, and the statistics of what counts."""
    if compiled:
        order, status, statistics = survey_by_kernels(nodes, masses, graph, ptr, limit)
        return order, status, statistics
    return graph, *in_torch.survey(nodes, masses, graph, len(ptr) - 1, limit)  # any order will do


Form = tuple[Callable[..., tuple[Tensor, ...]], Callable[..., tuple[Tensor, ...]]]


def by(compiled: bool) -> Form:
    """The way there and the way back."""
    return (receive_by_kernels, adjoint_by_kernels) if compiled else (_receive_in_torch, _adjoint_in_torch)


def _receive_in_torch(*given: Any) -> tuple[Tensor, ...]:
    return in_torch.receive(*(*given[:7], *given[9:]))


def _adjoint_in_torch(*given: Any) -> tuple[Tensor, ...]:
    return in_torch.adjoint(*(*given[:7], given[10], *given[12:]))


def _arrays(*tensors: Tensor) -> list[Any]:
    """The tensors as C-contiguous arrays, which is what kernels read."""
    return [tensor.detach().contiguous().numpy() for tensor in tensors]


def _or_none(masses: Tensor | None, nodes: Tensor) -> Tensor:
    return nodes.new_empty(0) if masses is None else masses


def _give_up(error: KernelError) -> None:
    if not _broken:
        _broken.append(str(error))
    say_once(f"{error}: torch computes the same, more slowly.")


def _room(nodes: Tensor, ptr: Tensor, points: int) -> int:
    """Numbers that the plans of all graphs take, each graph filled up to whole lanes."""
    return 8 * (nodes.shape[0] // 8 + ptr.shape[0]) * points


def _survey_shapes(
    nodes: Tensor, masses: Tensor | None, graph: Tensor, ptr: Tensor, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    status = nodes.new_empty(ptr.shape[0] - 1, dtype=torch.int8)
    return graph.new_empty(graph.shape), status, nodes.new_empty(3, nodes.shape[1], dtype=torch.float64)


@opaque(_survey_shapes)
def survey_by_kernels(
    nodes: Tensor, masses: Tensor | None, graph: Tensor, ptr: Tensor, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    order, status, statistics = _survey_shapes(nodes, masses, graph, ptr, limit)
    if not _broken:
        from flowpool.step import receive_kernels as kernels

        try:
            kernels.survey(
                *_arrays(nodes, graph, _or_none(masses, nodes)), limit, *_arrays(ptr, order, status, statistics)
            )
            return order, status, statistics
        except KernelError as error:
            _give_up(error)
    precise = None if masses is None else masses.double()
    return graph.argsort(stable=True), *in_torch.survey(nodes.double(), precise, graph, len(ptr) - 1, limit)


def _shapes(
    nodes: Tensor, masses: Tensor | None, reference: Tensor, shares: Tensor, epsilon: Tensor, table: Tensor, graph: Tensor,
    ptr: Tensor, order: Tensor, status: Tensor, switches: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    graphs, (points, dim) = ptr.shape[0] - 1, reference.shape
    return (
        table.new_empty(graphs, 2 * points * dim + dim + 1), table.new_empty(graphs, 2 * points * dim + points),
        table.new_empty(_room(nodes, ptr, points)), status.new_empty(graphs), table.new_empty(graphs),
    )  # fmt: skip


@opaque(_shapes)
def receive_by_kernels(
    nodes: Tensor, masses: Tensor | None, reference: Tensor, shares: Tensor, epsilon: Tensor, table: Tensor, graph: Tensor,
    ptr: Tensor, order: Tensor, status: Tensor, switches: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """:func:`flowpool.step.in_torch.receive`, but for how the portions are kept."""
    outputs = _shapes(nodes, masses, reference, shares, epsilon, table, graph, ptr, order, status, switches)
    rows, found, portions, ended, error = outputs
    if not _broken:
        from flowpool.step import receive_kernels as kernels

        given = _arrays(nodes, order, _or_none(masses, nodes), ptr, reference, shares.unsqueeze(0), epsilon, table)
        ended.copy_(status)
        try:
            kernels.receive(
                given,
                switches,
                tuple(_arrays(rows, found, portions.unsqueeze(0), ended, error)),
                torch.get_num_threads(),
            )
            return outputs
        except KernelError as problem:
            _give_up(problem)
    nodes, masses = nodes.double(), None if masses is None else masses.double()
    rows, found, own, ended, error = in_torch.receive(
        nodes, masses, reference, shares, epsilon, table, graph, status, switches
    )
    portions[: own.numel()] = own.flatten()
    return rows, found, portions, ended, error


def _adjoint_shapes(
    nodes: Tensor, masses: Tensor | None, reference: Tensor, shares: Tensor, epsilon: Tensor, table: Tensor, graph: Tensor,
    ptr: Tensor, order: Tensor, status: Tensor, switches: int, to_masses: bool, found: Tensor, portions: Tensor,
    upstream: Tensor, upstream_masses: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dim = nodes.shape[1]
    return (
        nodes.new_empty(nodes.shape), nodes.new_empty(nodes.shape[0] if to_masses else 0), reference.new_empty(reference.shape),
        shares.new_empty(shares.shape), table.new_empty(dim), table.new_empty(dim), table.new_empty(dim),
        epsilon.new_empty(epsilon.shape),
    )  # fmt: skip


@opaque(_adjoint_shapes)
def adjoint_by_kernels(
    nodes: Tensor, masses: Tensor | None, reference: Tensor, shares: Tensor, epsilon: Tensor, table: Tensor, graph: Tensor,
    ptr: Tensor, order: Tensor, status: Tensor, switches: int, to_masses: bool, found: Tensor, portions: Tensor,
    upstream: Tensor, upstream_masses: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """:func:`flowpool.step.in_torch.adjoint`; nothing for the masses unless that is asked for."""
    (points, dim), graphs = reference.shape, ptr.shape[0] - 1
    if not _broken:
        from flowpool.step import receive_kernels as kernels

        in_nodes, in_masses = nodes.new_empty(nodes.shape), nodes.new_empty(nodes.shape[0] if to_masses else 0)
        shared = table.new_empty(graphs, points * dim + points + 3 * dim + 1)
        given = _arrays(nodes, order, _or_none(masses, nodes), ptr, reference, shares.unsqueeze(0), epsilon, table)
        try:
            kernels.adjoint(
                given, switches, tuple(_arrays(found, portions.unsqueeze(0))), tuple(_arrays(upstream, upstream_masses)),
                tuple(_arrays(in_nodes, in_masses, shared)), torch.get_num_threads(),
            )  # fmt: skip
        except KernelError as error:
            _give_up(error)
        else:
            total = shared[:, :-1].sum(0).split([points * dim, points, dim, dim, dim])
            in_reference, in_shares, in_weights, in_factor, in_bias = (value.clone() for value in total)
            in_epsilon = shared[:, -1].clone()
            return (
                in_nodes,
                in_masses,
                in_reference.view(points, dim),
                in_shares,
                in_weights,
                in_factor,
                in_bias,
                in_epsilon,
            )
    precise, weighed = nodes.double(), None if masses is None else masses.double()
    again = (precise, weighed, reference, shares, epsilon, table, graph)
    _, found, portions, _, _ = in_torch.receive(*again, status, switches)
    back = in_torch.adjoint(*again, switches, found, portions, upstream, upstream_masses)
    return back[0].to(nodes), back[1].to(nodes) if to_masses else nodes.new_empty(0), *back[2:]
