"""Statistics over the tokens of all processes: one small all-reduce forward, one backward, for each norm."""
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .kernels import num_tokens


class Ranks:
    """The processes whose tokens an offline norm counts as one batch: those of a group, or all."""

    def __init__(self, process_group: dist.ProcessGroup | None = None):
        self.process_group = process_group

    def __deepcopy__(self, memo) -> Ranks:
        return self  # a process group is no data

    @property
    def size(self) -> int:
        """How many there are; 1 where torch.distributed is not initialized."""
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self.process_group)

    def sum(self, values: Tensor, weight: Tensor) -> Tensor:
        """The sum of all ranks' `values`, each times its `weight` `()`; values of weight 0 are ignored."""
        # `where`, because the mean over no token is NaN.
        values = torch.where(weight == 0, 0, values * weight.to(values))
        dist.all_reduce(values, group=self.process_group)
        return values


def is_synchronized(ranks: Ranks | None) -> bool:
    """Whether there are other processes to take statistics with."""
    return ranks is not None and ranks.size > 1


def merge_forward(ranks: Ranks | None, measured: Tensor, x: Tensor,
                  valid: Tensor | None) -> tuple[Tensor, int | Tensor, Tensor | None]:
    """What this process measured in `x` `(..., C)` over all processes: `(1, C)` mean square, or `(2, C)` biased
    variance and mean, NaN over no token; the number of tokens; and this process's share of them, None without others.
    """
    tokens = num_tokens(x) if valid is None else valid.sum(dtype=measured.dtype)
    if not is_synchronized(ranks):
        return measured, tokens, None
    own = tokens if isinstance(tokens, Tensor) else measured.new_full((), tokens)
    # Second moments about 0, in float64: what is lost is less than the rounding of float32 input.
    moments = measured
    if centered := len(measured) == 2:
        var, mean = measured.double()
        moments = torch.stack([var + mean.square(), mean])
    total = ranks.sum(torch.cat([moments.flatten(), moments.new_ones(1)]), own)
    moments, tokens = total[:-1].view_as(moments) / total[-1], total[-1].to(measured)
    if centered:
        square, mean = moments
        moments = torch.stack([(square - mean.square()).clamp(min=0), mean])
    return moments.to(measured), tokens, own / tokens


def merge_backward(ranks: Ranks | None, share: Tensor | None, g: Tensor, g_mean: Tensor | None,
                   loss_scale: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | float | None]:
    """The gradient statistics of a step over all processes, and what they are multiplied with, or None for 1.

    `share` comes from :func:`merge_forward` of the same step.
    """
    if share is None:
        return g, g_mean, loss_scale
    if g_mean is None:
        g = ranks.sum(g, share)
    else:
        g, g_mean = ranks.sum(torch.stack([g, g_mean]), share)
    # A process differentiates its own loss; the mean over the processes has a gradient so many times smaller.
    return g, g_mean, ranks.size if loss_scale is None else loss_scale * ranks.size


def convert_sync(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
    """Makes every offline norm of a model, or one norm, take its statistics over all processes, in place.

    The same model has to run on all of them, as for torch's SyncBatchNorm: each norm communicates once in a
    training forward and once in its backward pass. State and `state_dict` are as before. `process_group` names the
    processes and defaults to all. Returns `module`.
    """
    return _set_ranks(module, Ranks(process_group))


def revert_sync(module: nn.Module) -> nn.Module:
    """Makes every offline norm of a model, SyncUN too, take its own process's statistics, in place; `module`."""
    return _set_ranks(module, None)


def _set_ranks(module: nn.Module, ranks: Ranks | None) -> nn.Module:
    for norm in module.modules():
        if hasattr(norm, 'ranks'):
            norm.ranks = ranks
    return module
