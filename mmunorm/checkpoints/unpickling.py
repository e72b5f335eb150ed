"""Safe loading of untrusted checkpoints: only weights and plain data, no code.

A checkpoint is a pickle, and unpickling calls the functions that the file names. Only those in checkpoints of OpenMMLab
and timm are allowed.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch
from mmengine.logging.history_buffer import HistoryBuffer

from ..compat import load_listed
from ..utils import PreflightError
from .layouts import in_one_layout

_torch_load = torch.load
_trusted = False


@contextmanager
def restricted(trusted: bool = False) -> Iterator[None]:
    """A context in which every `torch.load` builds only the allowed objects; with `trusted`, any object.

    mmengine's loaders, its Runner and `init_cfg` all call `torch.load`, some of them again after a safe attempt has
    failed. A nested context has no effect.
    """
    global _trusted
    if torch.load is _load:
        yield
        return
    torch.load, _trusted = _load, trusted
    try:
        yield
    finally:
        torch.load, _trusted = _torch_load, False


def is_trusted() -> bool:
    """Whether the current context trusts files."""
    return _trusted


def _load(file, map_location=None, *args, **kwargs):
    """`torch.load` that raises a PreflightError for a file with other objects than data; weights are its `state_dict`.

    It also reads safetensors, and the index of weights in several files.
    """
    return in_one_layout(_content(file, map_location, *args, **kwargs))


def _content(file, map_location=None, *args, **kwargs):
    if str(file).endswith('.safetensors'):  # timm's, which contain only weights
        from safetensors.torch import load_file
        return load_file(file)
    if str(file).endswith('.index.json'):
        return _gathered(Path(file), map_location)
    if _trusted:
        return _torch_load(file, map_location, *args, **{**kwargs, 'weights_only': False})
    name = file if isinstance(file, (str, os.PathLike)) else getattr(file, 'name', 'that was read')
    try:
        _refuse_programs(file)
        content = load_listed(file, map_location, _listed(), _torch_load)
    except UnpicklingError as error:
        found = re.search(r'GLOBAL (\S+)', str(error))
        if found is None:  # not a pickle, or a damaged one; torch's advice does not apply
            cause = str(error).rpartition('WeightsUnpickler error:')[2].split('Check the documentation')[0]
            raise PreflightError(f'cannot read the checkpoint {name}: {" ".join(cause.split())}') from None
        raise PreflightError(
            f'the checkpoint {name} holds a `{found[1]}`, which is neither weights nor plain data: loading it could '
            'run code. If you trust its author, add --trust-checkpoint.') from None
    if isinstance(content, dict) and isinstance(content.get('meta'), dict):
        content['meta'].pop('config', None)  # the text of a config, which mmengine's Runner would execute on resuming
    return content


def _gathered(index: Path, map_location) -> dict[str, torch.Tensor]:
    """The weights in the files listed by a Hugging Face index in the same folder."""
    try:
        names = sorted({Path(name).name for name in json.loads(index.read_text())['weight_map'].values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PreflightError(f'{index} is not an index of weights: it has no `weight_map`.') from None
    if missing := [name for name in names if not index.with_name(name).is_file()]:
        raise PreflightError(f'{index} lists {missing[0]}, which is not in its folder.')
    return {name: value for part in names for name, value in _content(str(index.with_name(part)), map_location).items()}


def _refuse_programs(file) -> None:
    """Raises an UnpicklingError for the two file formats that `torch.load` reads without its unpickler."""
    if tarfile.is_tarfile(file):  # written before torch 0.2; until 2.5 loaded without any restriction
        raise UnpicklingError('GLOBAL tarfile')
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if any(name.endswith('/constants.pkl') for name in archive.namelist()):
                raise UnpicklingError('GLOBAL torch.jit.ScriptModule')
    if hasattr(file, 'seek'):
        file.seek(0)


@cache
def _listed() -> dict[str, object]:
    """The allowed objects besides tensors, by full name; all of them only create data."""
    listed = {
        'argparse.Namespace': argparse.Namespace,  # timm's `args`
        'builtins.getattr': _statistic,
        'builtins.slice': slice,
        'mmengine.logging.history_buffer.HistoryBuffer': HistoryBuffer,
        'numpy.ndarray': np.ndarray,
        'numpy.dtype': np.dtype,
        'torch.torch_version.TorchVersion': torch.torch_version.TorchVersion,
        'yacs.config.CfgNode': OrderedDict,  # the settings in the official Swin's and SLAB's files
    }
    for name in _STATISTICS:
        listed[f'mmengine.logging.history_buffer.HistoryBuffer.{name}'] = getattr(HistoryBuffer, name)
    arrays = np.zeros(0).__reduce__()[0]
    scalar = np.float64(0).__reduce__()[0]
    for core in ('numpy.core', 'numpy._core'):
        listed[f'{core}.multiarray._reconstruct'] = arrays
        listed[f'{core}.multiarray.scalar'] = scalar
    for code in '?bBhHiIlLqQefdgSU':
        kind = type(np.dtype(code))
        listed[f'numpy.dtypes.{kind.__name__}'] = kind
    return listed


_STATISTICS = ('current', 'max', 'mean', 'min')


def _statistic(owner, name: str):
    """The only `getattr` that a HistoryBuffer in a run's log needs."""
    if owner is not HistoryBuffer or name not in _STATISTICS:
        raise UnpicklingError(f'GLOBAL getattr({getattr(owner, "__name__", owner)},{name})')
    return getattr(HistoryBuffer, name)
