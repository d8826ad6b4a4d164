"""BatchNorm in which some rows do not count: nodes and graphs that are broken or empty.

The module holds the parameters and the running statistics and may be any of torch's, so that
``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` works as usual; only what it computes is written here. That also lets
processes share statistics on the CPU, where torch's own forward pass of SyncBatchNorm refuses to run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def normalised(norm: nn.BatchNorm1d | nn.SyncBatchNorm, rows: Tensor, counted: Tensor) -> Tensor:
    """All rows ``(K, C)`` after BatchNorm, in training with the statistics of the counted ones, ``(K,)`` bool.

    Fewer than two rows have no statistics worth learning from: they are normalised as in evaluation.
    """
    assert norm.running_mean is not None and norm.running_var is not None  # noqa: S101 - we make no other
    mean, variance = norm.running_mean.to(rows.dtype), norm.running_var.to(rows.dtype)
    if norm.training:
        count, own_mean, own_variance = _statistics(norm, rows, counted)
        enough = count >= 2
        _remember(norm, enough, own_mean.detach(), (own_variance * count / (count - 1)).detach())
        mean, variance = torch.where(enough, own_mean, mean), torch.where(enough, own_variance, variance)
    return (rows - mean) * torch.rsqrt(variance + norm.eps) * norm.weight + norm.bias


def _statistics(norm: nn.Module, rows: Tensor, counted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number of the counted rows ``(1,)``, their mean and their variance ``(C,)``; of all processes if they share."""
    ones = counted.to(rows.dtype).unsqueeze(-1)  # (K, 1)
    if not torch.compiler.is_compiling():
        # Without a trace of the other rows, not even in the order of the sums.
        ones, rows = ones[counted], rows[counted]
    total = _of_all_processes(norm, (torch.cat([torch.ones_like(ones), rows], 1) * ones).sum(0))
    count, mean = total[:1], total[1:] / total[:1].clamp(min=1)
    squares = _of_all_processes(norm, ((rows - mean).square() * ones).sum(0))
    return count, mean, squares / count.clamp(min=1)


@torch.no_grad()
def _remember(norm: nn.BatchNorm1d | nn.SyncBatchNorm, enough: Tensor, mean: Tensor, variance: Tensor) -> None:
    """Moves the running statistics towards those of a batch, if it had enough rows."""
    assert norm.num_batches_tracked is not None  # noqa: S101
    norm.num_batches_tracked += enough.squeeze(0)
    rate = 1 / norm.num_batches_tracked if norm.momentum is None else norm.momentum
    for running, own in ((norm.running_mean, mean), (norm.running_var, variance)):
        assert running is not None  # noqa: S101
        moved = running + rate * (own.to(running.dtype) - running)
        running.copy_(torch.where(enough, moved, running))


def share_statistics(norm: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Marks a module: its statistics are those of all processes of the group, as if it were converted."""
    norm.shares_statistics, norm.process_group = True, group  # type: ignore[assignment]


def _of_all_processes(norm: nn.Module, value: Tensor) -> Tensor:
    """The sum of a value over the processes of a module that shares statistics; the value itself otherwise."""
    shared = isinstance(norm, nn.SyncBatchNorm) or getattr(norm, "shares_statistics", False)
    if not shared or not dist.is_available() or not dist.is_initialized():
        return value
    total: Tensor = _Total.apply(value, norm.process_group)
    return total


class _Total(torch.autograd.Function):
    """Sum over processes; the loss is the sum of theirs, so that its gradient is one too."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group, total = group, value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        total = upstream.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
