"""BatchNorm in which some rows do not count: nodes and graphs that are broken or empty.

The module holds the parameters and the running statistics and may be any of torch's, so that
``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` works as usual. What it computes is written here for the cases that torch
does not know: rows that do not count, in a traced graph too, and processes that share statistics on the CPU, where the
forward pass of SyncBatchNorm refuses to run.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import batch_norm

Module = nn.BatchNorm1d | nn.SyncBatchNorm


class Norm(NamedTuple):
    """A BatchNorm with its tensors as they are now, or with copies of them on another device."""

    module: Module
    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    @staticmethod
    def of(module: Module) -> Norm:
        """With the tensors of the module, all of which it has, since we made it."""
        running = (module.running_mean, module.running_var, module.num_batches_tracked)
        return Norm(module, module.weight, module.bias, *cast(tuple[Tensor, Tensor, Tensor], running))

    @property
    def running(self) -> tuple[Tensor, ...]:
        """What training changes without a gradient."""
        return self[3:]

    @property
    def rate(self) -> float | Tensor:
        """How far the running statistics move towards those of this batch, after it was counted."""
        return 1 / self.num_batches_tracked if self.module.momentum is None else self.module.momentum


def normalised(norm: Norm, rows: Tensor, counted: Tensor | None) -> Tensor:
    """All rows ``(K, C)`` after BatchNorm, in training with the statistics of the counted ones alone.

    Fewer than two rows have no statistics worth learning from: they are normalised as in evaluation.

    Args:
        counted: ``(K,)`` bool; None: all.
    """
    if not norm.module.training:
        return _affine(norm, rows, norm.running_mean, norm.running_var)
    traced = torch.compiler.is_compiling()
    if traced or is_shared(norm.module) or rows.dtype != norm.weight.dtype:
        return _by_definition(norm, rows, counted)
    kept = rows if counted is None or bool(counted.all()) else rows[counted]
    if len(kept) < 2:
        return _affine(norm, rows, norm.running_mean, norm.running_var)
    norm.num_batches_tracked.add_(1)
    own = batch_norm(
        kept, norm.running_mean, norm.running_var, norm.weight, norm.bias, True, float(norm.rate), norm.module.eps
    )
    if kept is rows:
        return own
    variance, mean = torch.var_mean(kept, 0, correction=0)
    return _affine(norm, rows, mean, variance).index_put((cast(Tensor, counted),), own)


def share_statistics(module: Module, group: dist.ProcessGroup | None) -> None:
    """Marks a module: its statistics are those of all processes of the group, as if it were converted."""
    module.shares_statistics, module.process_group = True, group  # type: ignore[assignment]


def is_shared(module: Module) -> bool:
    """Whether the statistics are those of several processes."""
    asked = isinstance(module, nn.SyncBatchNorm) or getattr(module, "shares_statistics", False)
    return asked and dist.is_available() and dist.is_initialized()


def _affine(norm: Norm, rows: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """The rows with these statistics taken off."""
    slope = norm.weight * torch.rsqrt(variance + norm.module.eps)
    return (rows - mean) * slope + norm.bias


def _by_definition(norm: Norm, rows: Tensor, counted: Tensor | None) -> Tensor:
    """:func:`normalised` in training, without a question to a value that a traced graph does not know yet."""
    ones = rows.new_ones(len(rows), 1) if counted is None else counted.to(rows.dtype).unsqueeze(-1)
    total = _of_all(norm, (torch.cat([torch.ones_like(ones), rows], 1) * ones).sum(0))
    count, mean = total[0], total[1:] / total[0].clamp(min=1)
    variance = _of_all(norm, ((rows - mean).square() * ones).sum(0)) / count.clamp(min=1)
    enough = count >= 2
    used = torch.where(enough, mean, norm.running_mean), torch.where(enough, variance, norm.running_var)
    out = _affine(norm, rows, *used)
    _remember(norm, enough, mean.detach(), (variance * count / (count - 1)).detach())
    return out


@torch.no_grad()
def _remember(norm: Norm, enough: Tensor, mean: Tensor, variance: Tensor) -> None:
    """Moves the running statistics towards those of a batch, if it had enough rows."""
    norm.num_batches_tracked.add_(enough)
    rate = norm.rate
    for running, own in ((norm.running_mean, mean), (norm.running_var, variance)):
        running.copy_(torch.where(enough, running + rate * (own.to(running.dtype) - running), running))


def _of_all(norm: Norm, value: Tensor) -> Tensor:
    """The sum of a value over the processes of a module that shares statistics; the value itself otherwise."""
    if not is_shared(norm.module):
        return value
    total: Tensor = _Total.apply(value, norm.module.process_group)
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
