"""Brings a converted backbone nearer to the one with LayerNorm that it came from, before its training begins."""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..norms import OfflineNorm
from ..norms.layers import channel_axis, input_of
from ..norms.replace import put
from .convert import layer_norm_of, norms_to_fit, watched
from .statistics import mean_and_square, valid_tokens

RATE = 1e-3  # of the first try
SLOWER = 0.3  # each next try has this share of the rate
CHECK_EVERY = 25  # steps


@torch.no_grad()
def with_layer_norms(model: nn.Module) -> nn.Module:
    """A copy of a model that is about to be converted by :func:`convert_loaded`, with the LayerNorms themselves."""
    teacher = copy.deepcopy(model)
    put(teacher, {name: layer_norm_of(norm) for name, norm in norms_to_fit(teacher).items()})
    teacher.eval()  # returns nothing in mmdet's and mmpretrain's Swin
    return teacher.requires_grad_(False)


def adapt_batches(student: nn.Module, teacher: nn.Module, batches: Sequence, inputs_of: Callable[[object], Tensor],
                  distance: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor], steps: int) -> tuple[float, float]:
    """Trains a converted backbone to give the outputs of its teacher, in place; labels are not needed.

    The norms are as in inference, so that the map that is learned is the one that folds: AdamW without weight decay, a
    cosine from a rate of 1e-3, one batch a step, half of them mirrored. A network without statistics of its own breaks
    at a rate that another one takes. So the distance is measured every 25 steps, and where it has doubled or is not
    finite, training goes back to the best weights so far, with 0.3 of the rate. The best weights stay in the end.
    Statistics are measured anew; the maps stay.

    Args:
        student (nn.Module): converted; `(N, 3, H, W)` to a sequence of outputs.
        teacher (nn.Module): of :func:`with_layer_norms`.
        batches (Sequence): training images.
        inputs_of: the tensor `(N, 3, H, W)` of a batch.
        distance: of the student's outputs to the teacher's, a loss `()`.
        steps (int): of training.

    Returns:
        tuple[float, float]: the mean distance before and after, on up to 8 batches; it is never larger after.
    """
    modes = {module: module.training for module in student.modules()}
    student.eval()
    weights = [weight for weight in student.parameters() if weight.requires_grad]
    generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def mean_distance() -> float:
        return torch.stack([distance(student(x), teacher(x)) for x in map(inputs_of, batches[:8])]).mean().item()

    def kept() -> list[Tensor]:
        return [weight.detach().clone() for weight in weights]

    def optimizer_for(left: int, rate: float):
        optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.)
        # The rise is at least two steps long: torch divides by one less.
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=max(left, 20), pct_start=0.1)

    before = least = mean_distance()
    best, rate = kept(), RATE
    optimizer, schedule = optimizer_for(steps, rate)
    for step in tqdm(range(1, steps + 1), desc='adapting', unit='step', disable=None):
        x = inputs_of(batches[torch.randint(len(batches), (), generator=generator)])
        if torch.rand((), generator=generator) < 0.5:
            x = x.flip(-1)
        with torch.no_grad():
            wanted = teacher(x)
        loss = distance(student(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if step % CHECK_EVERY == 0 or step == steps or not loss.isfinite():
            now = mean_distance()
            if now <= least:
                best, least = kept(), now
            elif not now < 2 * least:  # nan, too
                put_back(weights, best)
                rate *= SLOWER
                optimizer, schedule = optimizer_for(steps - step, rate)
    put_back(weights, best)
    optimizer.zero_grad()
    measure_again(student, map(inputs_of, batches))
    for module, mode in modes.items():
        module.training = mode
    return before, least


@torch.no_grad()
def put_back(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


@torch.no_grad()
def measure_again(model: nn.Module, inputs: Iterable[Tensor]) -> None:
    """Gives offline norms the statistics of what they read now; their maps stay."""
    sums: dict[OfflineNorm, Tensor] = {}

    def add(norm: OfflineNorm, args: tuple, kwargs: dict, output: Tensor) -> None:
        x, pad_mask = input_of(args, kwargs)
        tokens = valid_tokens(x.movedim(channel_axis(norm, kwargs), -1), pad_mask)
        new = torch.stack([torch.full_like(tokens[0], len(tokens)), tokens.sum(0), tokens.square().sum(0)])
        sums[norm] = sums[norm] + new if norm in sums else new

    with watched((module for module in model.modules()
                  if isinstance(module, OfflineNorm) and not module.fold_obstacle), add):
        for x in inputs:
            model(x)
    for norm, total in sums.items():
        norm.set_affine(*norm.affine(), *mean_and_square(total))
