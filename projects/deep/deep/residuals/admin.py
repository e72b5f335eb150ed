"""Admin (arXiv 2004.08249): PostNorm whose stream is weighted by the variance of the branches before."""
from __future__ import annotations

from collections.abc import Callable

import torch
from mmengine.dist import all_reduce
from torch import Tensor, nn

from mmunorm.norms import OfflineNorm

from .base import RESIDUALS, Scale, StackPosition
from .post_norm import PostNorm


@RESIDUALS.register_module()
class Admin(PostNorm):
    """`x' = LN(w x + F(x))` with the parameter `weight` w `(C,)`, which :func:`profile_admin` sets before training."""

    def __init__(self, position: StackPosition):
        super().__init__(position)
        self.weight = nn.Parameter(torch.ones(position.channels))
        self.starts_stack = position.previous is None

    def scales(self) -> tuple[Scale, Scale]:
        return self.weight, None


def admins(model: nn.Module) -> list[Admin]:
    """The Admin connections of a model, in its order."""
    return [module for module in model.modules() if isinstance(module, Admin)]


@torch.no_grad()
def profile_admin(model: nn.Module, run: Callable[[], object]) -> None:
    """Sets the weights w of Admin's connections from one batch: 1, then the root of the variances added so far.

    With every w at 1, the batch determines the variance of each branch's output, without padded tokens. The k-th
    connection of a stack gets `w = sqrt(Var F_1 + ... + Var F_(k-1))` in each channel. In a distributed run the
    variances are averaged over the processes. The buffers of the model, such as statistics of norms, do not change.

    Args:
        model (nn.Module): in training mode, so that offline norms normalize by the batch.
        run: runs `model` on the batch, such as `lambda: model(images)`.

    Raises:
        ValueError: `model` has no Admin connection or is in eval mode, or `run` does not run each of them once.
    """
    connections = admins(model)
    if not connections:
        raise ValueError(f'model: {type(model).__name__} has no Admin connection')
    if not model.training:
        raise ValueError('model: must be in training mode, call model.train() first')
    variances: list[Tensor] = []
    pad_mask: Tensor | None = None
    not_started = [norm for norm in model.modules() if isinstance(norm, OfflineNorm) and norm.exact_steps is None]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def store_mask(connection: Admin, args: tuple) -> None:
        nonlocal pad_mask
        pad_mask = args[3] if len(args) == 4 else None  # as Residual.forward has them

    def record(drop: nn.Module, args: tuple[Tensor]) -> None:
        y = args[0] if pad_mask is None else args[0][~pad_mask]
        variances.append(y.double().var(correction=0))

    for connection in connections:
        connection.weight.fill_(1)
    for norm in not_started:
        norm.set_progress(0, 1)
    handles = [connection.register_forward_pre_hook(store_mask) for connection in connections]
    handles += [connection.drop.register_forward_pre_hook(record) for connection in connections]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
        for norm in not_started:
            norm.exact_steps = None
        for buffer, value in buffers:
            buffer.copy_(value)
    if len(variances) != len(connections):
        raise ValueError(f'run: must run each of the {len(connections)} Admin connections once, and ran '
                         f'{len(variances)}')
    total = torch.stack(variances)
    all_reduce(total, op='mean')
    for connection, variance in zip(connections, total, strict=True):
        if connection.starts_stack:
            sum_before = torch.zeros_like(variance)
        else:
            connection.weight.copy_(sum_before.sqrt().expand_as(connection.weight))
        sum_before = sum_before + variance
