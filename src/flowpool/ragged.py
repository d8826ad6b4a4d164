"""Products of matrices in a ragged batch: the rows of N nodes, sorted by graph, and one matrix per graph.

Two operators, each the derivative of the other. They go from graph to graph, so that no graph can feel another one, not
even in its rounding: there may be no room for all outer products, and sorting them into graphs takes longer than
computing them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flowpool.engines import HAS_NUMBA


def can_compile(tensor: Tensor) -> bool:
    """Whether there are kernels for it; where not, torch computes the same."""
    return HAS_NUMBA and tensor.device.type == "cpu" and tensor.dtype == torch.float64


@torch.library.custom_op("flowpool::sums_of_products", mutates_args=())
def sums_of_products(left: Tensor, right: Tensor, ptr: Tensor) -> Tensor:
    """Sum of the outer products of the rows ``(N, K)`` and ``(N, L)`` over each graph, ``(B, K, L)``."""
    if can_compile(left):
        from flowpool.compiled import ragged

        return torch.from_numpy(ragged.sums_of_products(*arrays(left, right, ptr), torch.get_num_threads()))
    return sums_in_torch(left, right, ptr)


@torch.library.custom_op("flowpool::products_of_rows", mutates_args=())
def products_of_rows(rows: Tensor, matrices: Tensor, ptr: Tensor) -> Tensor:
    """Each row ``(N, K)`` times the matrix of its graph ``(B, K, L)``, ``(N, L)``."""
    if can_compile(rows):
        from flowpool.compiled import ragged

        return torch.from_numpy(ragged.products_of_rows(*arrays(rows, matrices, ptr), torch.get_num_threads()))
    return products_in_torch(rows, matrices, ptr)


def sums_in_torch(left: Tensor, right: Tensor, ptr: Tensor) -> Tensor:
    """What :func:`sums_of_products` gives back, on any device."""
    total = left.new_zeros(ptr.shape[0] - 1, left.shape[1], right.shape[1])
    for graph, (start, end) in enumerate(pairwise(ptr.tolist())):
        torch.mm(left[start:end].T, right[start:end], out=total[graph])
    return total


def products_in_torch(rows: Tensor, matrices: Tensor, ptr: Tensor) -> Tensor:
    """What :func:`products_of_rows` gives back, on any device."""
    products = rows.new_empty(rows.shape[0], matrices.shape[2])
    for graph, (start, end) in enumerate(pairwise(ptr.tolist())):
        torch.mm(rows[start:end], matrices[graph], out=products[start:end])
    return products


@sums_of_products.register_fake
def _(left: Tensor, right: Tensor, ptr: Tensor) -> Tensor:
    return left.new_empty(ptr.shape[0] - 1, left.shape[1], right.shape[1])


@products_of_rows.register_fake
def _(rows: Tensor, matrices: Tensor, ptr: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[2])


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_sums(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    left, right, ptr = ctx.saved_tensors
    to_left, to_right, _ = ctx.needs_input_grad
    return (
        products_of_rows(right, upstream.mT, ptr) if to_left else None,
        products_of_rows(left, upstream, ptr) if to_right else None,
        None,
    )


def _differentiate_products(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, matrices, ptr = ctx.saved_tensors
    to_rows, to_matrices, _ = ctx.needs_input_grad
    return (
        products_of_rows(upstream, matrices.mT, ptr) if to_rows else None,
        sums_of_products(rows, upstream, ptr) if to_matrices else None,
        None,
    )


sums_of_products.register_autograd(_differentiate_sums, setup_context=_keep_inputs)
products_of_rows.register_autograd(_differentiate_products, setup_context=_keep_inputs)


def arrays(*tensors: Tensor) -> list[Any]:
    """The tensors as C-contiguous arrays, which is what kernels read."""
    return [tensor.detach().contiguous().numpy() for tensor in tensors]
