"""Running statistics that are measured again, as `torch.optim.swa_utils.update_bn` does for torch's BatchNorms."""
from __future__ import annotations

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..modules import eval_mode, unwrapped
from ..norms import OfflineNorm
from ..norms.layers import channel_axis, input_of
from ..utils import check_module
from .calls import hooked
from .convert import run
from .images import all_batches
from .report import ConversionError
from .statistics import valid_tokens


@torch.inference_mode(False)
@torch.no_grad()
def update_norms(model: nn.Module, batches, progress: bool = False) -> None:
    """Measures the running statistics of all offline norms of a model again, in place.

    Call it after new weights are loaded into a model: after an average of weights (SWA, EMA, model soups), as
    `torch.optim.swa_utils.update_bn`, which knows torch's BatchNorms alone. In a model that has both, call that first.

    The model runs once over all batches in eval mode. Each norm normalizes with the mean over the tokens that it has
    seen so far. A norm that does not run keeps its statistics. Frozen means (`centered='frozen'`), gradient statistics
    and counters do not change.

    Args:
        model (nn.Module): with offline norms, also in a wrapper such as `torch.optim.swa_utils.AveragedModel`.
        batches: training images, as for :func:`mmunorm.convert_norms`.
        progress (bool): show a progress bar. Defaults to False.

    Raises:
        TypeError: `model` is no module.
        ConversionError: a ValueError: the model has no offline norm, there are no batches, a batch is not what the
            model takes, or the input of a norm is not finite. The statistics are then as they were.
    """
    check_module(model)
    norms = {module: name for name, module in model.named_modules() if isinstance(module, OfflineNorm)}
    if not norms:
        raise ConversionError(f'model: {type(model).__name__} has no norm with running statistics of mmunorm')
    inner = unwrapped(model)
    batches = all_batches(batches)
    before = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
    sums: dict[nn.Module, Tensor] = {}

    def hook(norm, args, kwargs):
        x, pad_mask = input_of(args, kwargs)
        tokens = valid_tokens(norm.statistics_input(x.movedim(channel_axis(norm, kwargs), -1)), pad_mask)
        if len(tokens):
            new = torch.stack([torch.full_like(tokens[0], len(tokens)), tokens.sum(0), tokens.square().sum(0)])
            count, x, square = sums[norm] = sums.get(norm, 0) + new
            if not sums[norm].isfinite().all():
                raise ConversionError(f'the input of {norms[norm]} is not finite: no statistics can be taken')
            norm.set_statistics(x / count, square / count)

    try:
        with eval_mode(model), hooked(norms, hook, before=True):
            for batch in tqdm(batches, desc='measuring', unit='batch', disable=None if progress else True):
                run(inner, batch)
        if not sums:
            raise ConversionError('batches: there is none, or no norm runs on them')
    except BaseException:
        for buffer, values in before:
            buffer.copy_(values)
        raise
