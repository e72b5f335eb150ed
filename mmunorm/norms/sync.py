"""Statistics over the tokens of all processes: each norm makes one small all-reduce forward and one backward."""
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .kernels.reference import num_tokens


def num_processes() -> int:
    """Number of processes; 1 if torch.distributed is not initialized."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _sum_over_processes(values: Tensor, weight: Tensor) -> Tensor:
    """The sum of `weight * values` over the processes, with `weight` `()`; values of weight 0 are ignored."""
    # `where`, because the mean over no token is NaN.
    values = torch.where(weight == 0, 0, values * weight.to(values))
    dist.all_reduce(values)
    return values


def merge_forward(measured: Tensor, x: Tensor, valid: Tensor | None,
                  is_distributed: bool) -> tuple[Tensor, int | Tensor, Tensor | None]:
    """What was measured in `x` `(..., C)`, merged over all processes: mean square `(C,)`, or biased variance and mean
    `(2, C)`, NaN over no token; the number of tokens; and this process's share of them, None for a single process.
    """
    tokens = num_tokens(x) if valid is None else valid.sum(dtype=measured.dtype)
    if not is_distributed:
        return measured, tokens, None
    local = tokens if isinstance(tokens, Tensor) else measured.new_full((), tokens)
    # Second moments about 0, in float64: cancellation costs less than the rounding of float32 input.
    moments = measured
    if centered := measured.dim() == 2:
        var, mean = measured.double()
        moments = torch.stack([var + mean.square(), mean])
    total = _sum_over_processes(torch.cat([moments.flatten(), moments.new_ones(1)]), local)
    moments, tokens = total[:-1].view_as(moments) / total[-1], total[-1].to(measured)
    if centered:
        square, mean = moments
        moments = torch.stack([(square - mean.square()).clamp(min=0), mean])
    return moments.to(measured), tokens, local / tokens


def merge_backward(share: Tensor | None, g: Tensor, g_mean: Tensor | None,
                   loss_scale: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | float | None]:
    """The gradient statistics of a step over all processes, and the factor that they contain, None for 1.

    `share` comes from :func:`merge_forward` of the same step.
    """
    if share is None:
        return g, g_mean, loss_scale
    if g_mean is None:
        g = _sum_over_processes(g, share)
    else:
        g, g_mean = _sum_over_processes(torch.stack([g, g_mean]), share)
    # A process differentiates its own loss; the gradient of the mean over the processes is smaller by their number.
    return g, g_mean, num_processes() if loss_scale is None else loss_scale * num_processes()


def convert_sync(module: nn.Module) -> nn.Module:
    """Makes every offline norm of a model, or one norm, use statistics over all processes, in place.

    As with torch's SyncBatchNorm, the same model has to run in all of them: each norm communicates once in a training
    forward pass and once in its backward pass. The `state_dict` does not change. Returns `module`.
    """
    return _set_synchronized(module, True)


def revert_sync(module: nn.Module) -> nn.Module:
    """Makes every offline norm of a model, also SyncUN, use the statistics of its own process; returns `module`."""
    return _set_synchronized(module, False)


def _set_synchronized(module: nn.Module, synchronized: bool) -> nn.Module:
    for norm in module.modules():
        if hasattr(norm, 'synchronized'):
            norm.synchronized = synchronized
    return module
