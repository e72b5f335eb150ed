"""Reads checkpoint files and loads them strictly."""
from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mmengine.runner.checkpoint import load_state_dict
from torch import Tensor, nn

from ..norms import OfflineNorm
from ..norms.layers import norm_layers
from ..utils import PreflightError, error_text, plural
from .layouts import computed_tables, weights_for
from .reading import read_content

_RESIZED = ('relative_position_bias_table', 'pos_embed')


def check_checkpoint(path: str, folder: bool = False) -> None:
    """Raises a PreflightError if a local checkpoint is not a file, or with `folder` not a file or folder."""
    if '://' in path or os.path.isfile(path):
        return
    if not os.path.isdir(path):
        raise PreflightError(f'there is no checkpoint {path} (working directory {os.getcwd()}).')
    if folder:
        return
    latest = max(Path(path).glob('*.pth'), key=os.path.getmtime, default=None)
    advice = f'choose a checkpoint in it, such as {latest}' if latest else 'a checkpoint is a file'
    raise PreflightError(f'{path} is a folder: {advice}.')


def read_checkpoint(path: str) -> dict:
    """Reads a checkpoint on the CPU; a PreflightError if it is none, or holds other objects than data."""
    check_checkpoint(path)
    try:
        content = read_content(str(path))
    except PreflightError:
        raise
    except Exception as error:  # unpickling another file may raise anything
        raise PreflightError(f'cannot read the checkpoint {path}: {error_text(error)}') from error
    if not isinstance(content, dict) or not isinstance(content.get('state_dict', content), dict):
        raise PreflightError(f'{path} is not a checkpoint: it contains a {type(content).__name__} without a '
                             '`state_dict`.')
    return content


def load_weights(model: nn.Module, checkpoint: str) -> dict:
    """Loads all weights and statistics of a model; returns the checkpoint's `meta`.

    Names of other projects are renamed to mmpretrain's, see :mod:`.layouts`. A PreflightError if the checkpoint cannot
    be read, has non-finite values, or has missing or unexpected keys.
    """
    content = read_checkpoint(checkpoint)
    weights = weights_for(model, content)
    try:
        with computed_tables(model):
            load_state_dict(model, weights, strict=True)
    except RuntimeError as error:
        check_statistics(model, checkpoint)
        raise PreflightError(_mismatch(model, weights, checkpoint, str(error))) from error
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        # Other buffers, such as attention masks, may be infinite.
        if (isinstance(value, nn.Parameter) or name.endswith(('running_mean', 'running_var'))) and (
                not value.isfinite().all()):
            kind = 'NaN' if value.isnan().any() else 'infinite values'
            raise PreflightError(f'the checkpoint {checkpoint} has {kind} in {name}: its training has diverged.')
    return content.get('meta', {})


def num_fitting(model: nn.Module, weights: Mapping[str, Tensor]) -> int:
    """How many of a model's matrices `weights` have; a file may lack a head, or have other layers."""
    # By the names of checkpoints: mmpretrain's TimmClassifier leaves out a prefix there. Loading resizes positions.
    return sum(isinstance(value, nn.Parameter) and value.ndim > 1 and not name.endswith(_RESIZED)
               and name in weights and weights[name].shape == value.shape
               for name, value in model.state_dict(keep_vars=True).items())


def check_fits(model: nn.Module, weights: Mapping[str, Tensor], checkpoint: str) -> None:
    """Raises a PreflightError if a model has none of the weights of a file, which mmengine only logs."""
    if not num_fitting(model, weights):
        raise PreflightError(_mismatch(model, weights, checkpoint, 'no weight has a name and shape of the model.'))


def _mismatch(model: nn.Module, weights: Mapping[str, Tensor], checkpoint: str, error: str) -> str:
    """Why a checkpoint does not fit a model: the error, or a hint if it has other norms."""
    names, expected, norms = {*weights}, {*model.state_dict()}, dict(norm_layers(model))
    if (odd := names ^ expected) and all(key.rpartition('.')[0] in norms for key in odd):
        key = min(odd)
        of_norms = {name.rpartition('.')[2] for name in names if name.rpartition('.')[0] in norms}
        kind = 'UN+' if 'running_mean' in of_norms else 'UN' if 'running_var' in of_norms else 'LN'
        return (f"the checkpoint {checkpoint} {'has' if key in names else 'lacks'} {key}: its norms are not the "
                f"config's. Name them with --norm, such as --norm {kind}.")
    return f'the checkpoint {checkpoint} does not fit the config: {" ".join(error.split())[:400]}'


def check_statistics(model: nn.Module, checkpoint: str | None) -> None:
    """Raises a PreflightError if offline norms of the model got no statistics, such as from a model with LayerNorm."""
    lacking = [name for name, norm in model.named_modules() if isinstance(norm, OfflineNorm) and norm.lacks_statistics]
    if lacking:
        kind = type(model.get_submodule(lacking[0])).__name__
        more = f' and {plural(len(lacking) - 1, "other")}' if len(lacking) > 1 else ''
        raise PreflightError(
            f'{checkpoint or "the checkpoint"} has the scale but not the statistics of {lacking[0]}{more}: it is of a '
            f'model with another norm, such as LayerNorm. Use a checkpoint of a '
            f'model with {kind}, or run this one with its own norm (--norm LN).')
