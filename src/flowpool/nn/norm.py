"""BatchNorm in which some rows do not count: nodes and graphs that are broken or empty.

The module holds the parameters and the running statistics and may be any of torch's, so that
``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` works as usual. What it computes is written here for the cases that torch
does not know: rows that do not count, in a traced graph too, and processes that share statistics on the CPU, where the
forward pass of SyncBatchNorm refuses to run.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import batch_norm

from flowpool.inputs import may_look
from flowpool.step.receive import Norming

Module = nn.BatchNorm1d | nn.SyncBatchNorm


def norming_of(module: Module) -> Norming:
    """How the module norms nodes, now."""
    group = module.process_group if is_shared(module) else False
    return Norming(*_tensors(module), module.eps, module.training, group)


def normalised(module: Module, rows: Tensor, counted: Tensor | None) -> Tensor:
    """All rows ``(K, C)`` after BatchNorm, in training with the statistics of the counted ones alone.

    Fewer than two rows have no statistics worth learning from: they are normalised as in evaluation.

    Args:
        counted: ``(K,)`` bool; None: all.
    """
    weight, bias, mean, variance = _tensors(module)
    rows = rows.to(torch.promote_types(rows.dtype, weight.dtype))
    if not module.training:
        return _affine(module, rows, mean, variance)
    if torch.compiler.is_compiling() or is_shared(module) or rows.dtype != weight.dtype or rows.device.type != "cpu":
        return _by_definition(module, rows, counted)
    kept = rows if counted is None or bool(counted.all()) else rows[counted]
    if len(kept) < 2:
        return _affine(module, rows, mean, variance)
    cast(Tensor, module.num_batches_tracked).add_(1)
    own = batch_norm(kept, mean, variance, weight, bias, True, float(_rate(module)), module.eps)
    if kept is rows:
        return own
    variance, mean = torch.var_mean(kept, 0, correction=0)
    return _affine(module, rows, mean, variance).index_put((cast(Tensor, counted),), own)


@torch.no_grad()
def remember(module: Module, number: Tensor, mean: Tensor, variance: Tensor) -> None:
    """Moves the running statistics towards those of a batch, if it had two rows or more."""
    if may_look(number):
        if (count := float(number.flatten()[0])) >= 2:
            cast(Tensor, module.num_batches_tracked).add_(1)
            for running, own in zip(_tensors(module)[2:], (mean, variance * (count / (count - 1))), strict=True):
                running.lerp_(own.to(running.dtype), float(_rate(module)))
        return
    cast(Tensor, module.num_batches_tracked).add_((number >= 2).flatten()[0])
    rate, enough = _rate(module), number >= 2
    unbiased = variance * number / (number - 1).clamp(min=1)
    for running, own in zip(_tensors(module)[2:], (mean, unbiased), strict=True):
        running.copy_(torch.where(enough, running + rate * (own.to(running.dtype) - running), running))


def share_statistics(module: Module, group: dist.ProcessGroup | None) -> None:
    """Marks a module: its statistics are those of all processes of the group, as if it were converted."""
    module.shares_statistics, module.process_group = True, group  # type: ignore[assignment]


def is_shared(module: Module) -> bool:
    """Whether the statistics are those of several processes."""
    asked = isinstance(module, nn.SyncBatchNorm) or getattr(module, "shares_statistics", False)
    return asked and dist.is_available() and dist.is_initialized()


def _tensors(module: Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All of which the module has, since we made it."""
    running = cast(tuple[Tensor, Tensor], (module.running_mean, module.running_var))
    return module.weight, module.bias, *running


def _rate(module: Module) -> float | Tensor:
    """How far the running statistics move towards those of this batch, after it was counted."""
    return 1 / cast(Tensor, module.num_batches_tracked) if module.momentum is None else module.momentum


def _affine(module: Module, rows: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """The rows with these statistics taken off."""
    slope = module.weight * torch.rsqrt(variance + module.eps)
    return (rows - mean) * slope + module.bias


def _by_definition(module: Module, rows: Tensor, counted: Tensor | None) -> Tensor:
    """:func:`normalised` in training, without a question to a value that a traced graph does not know yet."""
    ones = rows.new_ones(len(rows), 1) if counted is None else counted.to(rows.dtype).unsqueeze(-1)
    total = _of_all(module, (torch.cat([torch.ones_like(ones), rows], 1) * ones).sum(0))
    count, mean = total[0], total[1:] / total[0].clamp(min=1)
    variance = _of_all(module, ((rows - mean).square() * ones).sum(0)) / count.clamp(min=1)
    enough = count >= 2
    _, _, running_mean, running_var = _tensors(module)
    used = torch.where(enough, mean, running_mean), torch.where(enough, variance, running_var)
    out = _affine(module, rows, *used)
    remember(module, count, mean.detach(), variance.detach())
    return out


def _of_all(module: Module, value: Tensor) -> Tensor:
    """The sum of a value over the processes of a module that shares statistics; the value itself otherwise."""
    if not is_shared(module):
        return value
    total: Tensor = _Total.apply(value, module.process_group)
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
