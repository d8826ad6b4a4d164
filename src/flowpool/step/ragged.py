"""Products of matrices in a ragged batch: the rows of N nodes, sorted by graph, and one matrix per graph.

Two functions, each the derivative of the other. They go from graph to graph, so that no graph can feel another one, not
even in its rounding: there may be no room for all outer products, and sorting them into graphs takes longer than
computing them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowpool.core.once import refuse_second_derivatives
from flowpool.engines.choice import missing_kernels
from flowpool.engines.devices import opaque
from flowpool.options import Engine


def leaves_device(engine: Engine, nodes: Tensor) -> bool:
    """Whether what is on another device is to be brought to the CPU, where kernels can compute with it."""
    return nodes.device.type != "cpu" and engine != "torch" and missing_kernels() is None


def use_kernels(engine: Engine, nodes: Tensor) -> bool:
    """Whether kernels compute; an error if they are asked for and cannot. Where not, torch computes the same."""
    obstacle = missing_kernels()
    if nodes.device.type != "cpu":
        obstacle = obstacle or f"it runs on the CPU, the nodes are on {nodes.device}"
    if engine == "compiled" and obstacle:
        raise ValueError(f"The compiled engine cannot be used: {obstacle}. Pass engine='torch' or 'auto'.")
    return engine != "torch" and obstacle is None


def arrays(*tensors: Tensor) -> list[Any]:
    """The tensors as C-contiguous arrays, which is what kernels read."""
    return [tensor.detach().contiguous().numpy() for tensor in tensors]


def sums_of_products(left: Tensor, right: Tensor, ptr: Tensor, compiled: bool) -> Tensor:
    """Sum of the outer products of the rows ``(N, K)`` and ``(N, L)`` over each graph, ``(B, K, L)``.

    Args:
        compiled: by kernels, for float64 on the CPU; otherwise by torch.
    """
    total: Tensor = _Sums.apply(left, right, ptr, compiled)
    return total


def products_of_rows(rows: Tensor, matrices: Tensor, ptr: Tensor, compiled: bool) -> Tensor:
    """Each row ``(N, K)`` times the matrix of its graph ``(B, K, L)``, ``(N, L)``; ``compiled`` as above."""
    products: Tensor = _Products.apply(rows, matrices, ptr, compiled)
    return products


@opaque(lambda left, right, ptr, compiled: left.new_empty(ptr.shape[0] - 1, left.shape[1], right.shape[1]))
def ragged_sums(left: Tensor, right: Tensor, ptr: Tensor, compiled: bool) -> Tensor:
    """:func:`sums_of_products` without a derivative."""
    if compiled:
        from flowpool.step import ragged_kernels as ragged

        first, second, offsets = arrays(left, right, ptr)
        return torch.from_numpy(ragged.sums_of_products(first, second, offsets, torch.get_num_threads()))
    return sums_in_torch(left, right, ptr)


@opaque(lambda rows, matrices, ptr, compiled: rows.new_empty(rows.shape[0], matrices.shape[2]))
def ragged_products(rows: Tensor, matrices: Tensor, ptr: Tensor, compiled: bool) -> Tensor:
    """:func:`products_of_rows` without a derivative."""
    if compiled:
        from flowpool.step import ragged_kernels as ragged

        first, second, offsets = arrays(rows, matrices, ptr)
        return torch.from_numpy(ragged.products_of_rows(first, second, offsets, torch.get_num_threads()))
    return products_in_torch(rows, matrices, ptr)


def sums_in_torch(left: Tensor, right: Tensor, ptr: Tensor) -> Tensor:
    """What :func:`ragged_sums` gives back, on any device; column by column of ``left``, all graphs at once."""
    total = left.new_zeros(ptr.shape[0] - 1, left.shape[1], right.shape[1])
    for column in range(left.shape[1]):
        # Each graph is summed by itself in its own order, which scattering does not promise on every device.
        total[:, column] = torch.segment_reduce(
            left[:, column : column + 1] * right, "sum", lengths=ptr.diff(), axis=0, unsafe=True, initial=0.0
        )
    return total


def products_in_torch(rows: Tensor, matrices: Tensor, ptr: Tensor) -> Tensor:
    """What :func:`ragged_products` gives back, on any device; column by column of ``rows``, all graphs at once."""
    graphs = torch.arange(ptr.shape[0] - 1, device=ptr.device)
    graph = graphs.repeat_interleave(ptr.diff(), output_size=rows.shape[0])
    products = rows.new_zeros(rows.shape[0], matrices.shape[2])
    for column in range(rows.shape[1]):
        products += rows[:, column : column + 1] * matrices[:, column][graph]
    return products


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, ptr: Tensor, compiled: bool) -> Tensor:
        ctx.save_for_backward(left, right, ptr)
        ctx.compiled = compiled
        return ragged_sums(left, right, ptr, compiled)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        refuse_second_derivatives()
        left, right, ptr = ctx.saved_tensors
        to_left, to_right, _, _ = ctx.needs_input_grad
        return (
            ragged_products(right, upstream.mT, ptr, ctx.compiled) if to_left else None,
            ragged_products(left, upstream, ptr, ctx.compiled) if to_right else None,
            None,
            None,
        )


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, ptr: Tensor, compiled: bool) -> Tensor:
        ctx.save_for_backward(rows, matrices, ptr)
        ctx.compiled = compiled
        return ragged_products(rows, matrices, ptr, compiled)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        refuse_second_derivatives()
        rows, matrices, ptr = ctx.saved_tensors
        to_rows, to_matrices, _, _ = ctx.needs_input_grad
        return (
            ragged_products(upstream, matrices.mT, ptr, ctx.compiled) if to_rows else None,
            ragged_sums(rows, upstream, ptr, ctx.compiled) if to_matrices else None,
            None,
            None,
        )
