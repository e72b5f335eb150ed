"""Statistics over the tokens of all processes: one small all-reduce forward, one backward, for each norm."""
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .kernels import num_tokens, statistics_dtype


class Ranks:
    """The processes whose tokens an offline norm counts as one batch.

    Args:
        process_group (ProcessGroup, optional): Defaults to None, all processes.
    """

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

    def merge(self, measured: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The statistics over all ranks' tokens; NaN where there is none.

        Args:
            measured: this rank's, `(1, C)` mean square, or `(2, C)` biased variance and mean.
            tokens: `()`, how many they were measured over; 0 ignores `measured`.

        Returns:
            The same over all ranks, and the number of all their tokens, `()`.
        """
        centered = measured.shape[0] == 2
        if centered:
            # Second moments about 0, in float64: what is lost is less than the rounding of float32 input.
            var, mean = measured.double()
            moments = torch.stack([var + mean.square(), mean])
        else:
            moments = measured
        total = self._sum(torch.cat([self._weighted(moments, tokens).flatten(), tokens.to(moments).view(1)]))
        merged, tokens = total[:-1].view_as(moments) / total[-1], total[-1].to(measured)
        if centered:
            square, mean = merged
            merged = torch.stack([(square - mean.square()).clamp(min=0), mean])
        return merged.to(measured), tokens

    def mean(self, values: Tensor, share: Tensor) -> Tensor:
        """The mean of all ranks' `values`, weighted by `share` `()`; one whose share is 0 is ignored."""
        return self._sum(self._weighted(values, share))

    def _weighted(self, values: Tensor, weight: Tensor) -> Tensor:
        # `where`, because the mean over no token is NaN.
        return torch.where(weight == 0, 0, values * weight.to(values))

    def _sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values, group=self.process_group)
        return values


def is_synchronized(ranks: Ranks | None) -> bool:
    """Whether there are other processes to take statistics with."""
    return ranks is not None and ranks.size > 1


def merge_forward(ranks: Ranks | None, measured: Tensor, x: Tensor,
                  valid: Tensor | None) -> tuple[Tensor, int | Tensor | None, Tensor | None]:
    """The statistics of a step over all its processes.

    Args:
        ranks: None is this process alone.
        measured: `(1, C)` or `(2, C)`, of this process.
        x: `(..., C)`, what was measured.
        valid: None or bool `x.shape[:-1]`, False where a token is padding.

    Returns:
        `measured` over all processes; the number of tokens, an int or `()`, None where nobody asks for it; and
        this process's share of them `()`, None without others.
    """
    if not is_synchronized(ranks):
        return measured, _count_tokens(x, valid) if len(measured) == 2 else None, None
    tokens = _count_tokens(x, valid)
    own = tokens if isinstance(tokens, Tensor) else measured.new_full((), tokens)
    merged, tokens = ranks.merge(measured, own)
    return merged, tokens, own / tokens


def merge_backward(ranks: Ranks | None, share: Tensor | None, g: Tensor, g_mean: Tensor | None,
                   loss_scale: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | float | None]:
    """The gradient statistics of a step over all its processes.

    Args:
        ranks, share: of the same step's :func:`merge_forward`.
        g, g_mean: `(C,)`, of this process.
        loss_scale: `()`, what the loss was multiplied with, or None.

    Returns:
        `g` and `g_mean` over all processes, and what they are multiplied with, or None for 1.
    """
    if share is None:
        return g, g_mean, loss_scale
    if g_mean is None:
        g = ranks.mean(g, share)
    else:
        g, g_mean = ranks.mean(torch.stack([g, g_mean]), share)
    # A process differentiates its own loss; the mean over the processes has a gradient so many times smaller.
    return g, g_mean, ranks.size if loss_scale is None else loss_scale * ranks.size


def _count_tokens(x: Tensor, valid: Tensor | None) -> int | Tensor:
    """How many tokens of `x` count; with `valid` a tensor `()` in the dtype of its statistics."""
    return num_tokens(x) if valid is None else valid.sum(dtype=statistics_dtype(x.dtype))


def convert_sync(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
    """Makes every offline norm of a model take its statistics over all processes, in place.

    The same model has to run on all of them, as for torch's SyncBatchNorm: each norm communicates once in a
    training forward and once in its backward pass. State and `state_dict` are as before.

    Args:
        module (nn.Module): a model, or one norm.
        process_group (ProcessGroup, optional): the processes. Defaults to None, all of them.

    Returns:
        `module`.
    """
    return _set_ranks(module, Ranks(process_group))


def revert_sync(module: nn.Module) -> nn.Module:
    """Makes every offline norm of a model, SyncUN too, take its own process's statistics, in place.

    Returns:
        `module`.
    """
    return _set_ranks(module, None)


def _set_ranks(module: nn.Module, ranks: Ranks | None) -> nn.Module:
    for norm in module.modules():
        if hasattr(norm, 'ranks'):
            norm.ranks = ranks
    return module
