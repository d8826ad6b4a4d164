"""Products of matrices in a ragged batch: the rows of N nodes, sorted by graph, and one matrix per graph.

Two functions, each the derivative of the other. They go from graph to graph, so that no graph can feel another one, not
even in its rounding: there may be no room for all outer products, and sorting them into graphs takes longer than
computing them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flowpool.engines.choice import missing_kernels

_Function = TypeVar("_Function", bound=Callable[..., Any])


def opaque(fake: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Makes a function an operator that ``torch.compile`` does not look into; ``fake`` gives the shape of its result.

    In eager mode it stays a function, because calling an operator takes longer than small graphs do.
    """

    def decorate(function: _Function) -> _Function:
        operator = torch.library.custom_op(f"flowpool::{function.__name__}", function, mutates_args=())
        operator.register_fake(fake)

        @wraps(function)
        def call(*given: Tensor) -> Any:
            return operator(*given) if torch.compiler.is_compiling() else function(*given)

        return cast(_Function, call)

    return decorate


def can_compile(tensor: Tensor) -> bool:
    """Whether there are kernels for it; where not, torch computes the same."""
    return missing_kernels() is None and tensor.device.type == "cpu" and tensor.dtype == torch.float64


def arrays(*tensors: Tensor) -> list[Any]:
    """The tensors as C-contiguous arrays, which is what kernels read."""
    return [tensor.detach().contiguous().numpy() for tensor in tensors]


def sums_of_products(left: Tensor, right: Tensor, ptr: Tensor) -> Tensor:
    """Sum of the outer products of the rows ``(N, K)`` and ``(N, L)`` over each graph, ``(B, K, L)``."""
    total: Tensor = _Sums.apply(left, right, ptr)
    return total


def products_of_rows(rows: Tensor, matrices: Tensor, ptr: Tensor) -> Tensor:
    """Each row ``(N, K)`` times the matrix of its graph ``(B, K, L)``, ``(N, L)``."""
    products: Tensor = _Products.apply(rows, matrices, ptr)
    return products


@opaque(lambda left, right, ptr: left.new_empty(ptr.shape[0] - 1, left.shape[1], right.shape[1]))
def ragged_sums(left: Tensor, right: Tensor, ptr: Tensor) -> Tensor:
    """:func:`sums_of_products` without a derivative."""
    if can_compile(left):
        from flowpool.step import ragged_kernels as ragged

        first, second, offsets = arrays(left, right, ptr)
        return torch.from_numpy(ragged.sums_of_products(first, second, offsets, torch.get_num_threads()))
    return sums_in_torch(left, right, ptr)


@opaque(lambda rows, matrices, ptr: rows.new_empty(rows.shape[0], matrices.shape[2]))
def ragged_products(rows: Tensor, matrices: Tensor, ptr: Tensor) -> Tensor:
    """:func:`products_of_rows` without a derivative."""
    if can_compile(rows):
        from flowpool.step import ragged_kernels as ragged

        first, second, offsets = arrays(rows, matrices, ptr)
        return torch.from_numpy(ragged.products_of_rows(first, second, offsets, torch.get_num_threads()))
    return products_in_torch(rows, matrices, ptr)


def sums_in_torch(left: Tensor, right: Tensor, ptr: Tensor) -> Tensor:
    """What :func:`ragged_sums` gives back, on any device."""
    total = left.new_zeros(ptr.shape[0] - 1, left.shape[1], right.shape[1])
    for graph, (start, end) in enumerate(pairwise(ptr.tolist())):
        torch.mm(left[start:end].T, right[start:end], out=total[graph])
    return total


def products_in_torch(rows: Tensor, matrices: Tensor, ptr: Tensor) -> Tensor:
    """What :func:`ragged_products` gives back, on any device."""
    products = rows.new_empty(rows.shape[0], matrices.shape[2])
    for graph, (start, end) in enumerate(pairwise(ptr.tolist())):
        torch.mm(rows[start:end], matrices[graph], out=products[start:end])
    return products


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, ptr: Tensor) -> Tensor:
        ctx.save_for_backward(left, right, ptr)
        return ragged_sums(left, right, ptr)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        left, right, ptr = ctx.saved_tensors
        to_left, to_right, _ = ctx.needs_input_grad
        return (
            ragged_products(right, upstream.mT, ptr) if to_left else None,
            ragged_products(left, upstream, ptr) if to_right else None,
            None,
        )


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, ptr: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrices, ptr)
        return ragged_products(rows, matrices, ptr)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, matrices, ptr = ctx.saved_tensors
        to_rows, to_matrices, _ = ctx.needs_input_grad
        return (
            ragged_products(upstream, matrices.mT, ptr) if to_rows else None,
            ragged_sums(rows, upstream, ptr) if to_matrices else None,
            None,
        )
