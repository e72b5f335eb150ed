"""Reads checkpoint files as weights and plain data, with `torch.load(weights_only=True)`.

A checkpoint is a pickle, and unpickling calls what the file names. torch allows tensors and plain data, and what is
listed here: what checkpoints of OpenMMLab and timm hold besides. Before torch 2.4 it takes no list, and a file with
more needs `--trust-checkpoint`.
"""
from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pickle import UnpicklingError

import numpy as np
import torch
from mmengine.logging.history_buffer import HistoryBuffer
from mmengine.runner import CheckpointLoader

from ..compat import add_safe_globals, is_program
from ..fusion.layers import FoldedAway
from ..utils import PreflightError

# torch's own switches for all calls of `torch.load`: data alone, and any object where the caller does not choose.
_DATA, _ANYTHING = 'TORCH_FORCE_WEIGHTS_ONLY_LOAD', 'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'


@contextmanager
def reading(trusted: bool = False) -> Iterator[None]:
    """A context in which files are read as data, also by mmengine's loaders; with `trusted`, as any objects.

    mmengine's loaders call `torch.load` again without restriction after a safe attempt has failed, which torch's
    variable prevents. It also holds for child processes.
    """
    before = {name: os.environ.pop(name, None) for name in (_DATA, _ANYTHING)}
    os.environ[_ANYTHING if trusted else _DATA] = '1'
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def is_trusted() -> bool:
    """Whether files may hold any object: inside `reading(trusted=True)`, or by torch's environment variable."""
    return os.environ.get(_ANYTHING, '0').lower() in ('1', 'y', 'yes', 'true')


def read_content(path: str):
    """What a checkpoint file holds, on the CPU: of `torch.save`, safetensors, or at a URL that mmengine can read.

    A PreflightError if it holds other objects than data.
    """
    if path.endswith('.safetensors'):
        from safetensors.torch import load_file
        return load_file(path)
    add_safe_globals(_LISTED)  # each time: torch's `safe_globals`, which mmengine uses, takes out what others listed
    try:
        if '://' in path:
            with reading(is_trusted()):
                return CheckpointLoader.load_checkpoint(path, map_location='cpu')
        if not is_trusted() and is_program(path):
            raise UnpicklingError('GLOBAL torch.jit.ScriptModule')
        return torch.load(path, map_location='cpu', weights_only=not is_trusted())
    except UnpicklingError as error:
        found = re.search(r'(?:GLOBAL|Unsupported class) (\S+)', str(error))
        if found is None:  # not a pickle, or a damaged one; torch's advice does not apply
            cause = str(error).rpartition('WeightsUnpickler error:')[2].split('Check the documentation')[0]
            raise PreflightError(f'cannot read the checkpoint {path}: {" ".join(cause.split())}') from None
        raise PreflightError(
            f'the checkpoint {path} holds a `{found[1]}`, which is neither weights nor plain data: loading it could '
            'run code. If you trust its author, add --trust-checkpoint.') from None


def _statistic(owner, name: str):
    """The only `getattr` that a HistoryBuffer in a run's log needs."""
    if owner is not HistoryBuffer or name not in ('current', 'max', 'mean', 'min'):
        raise UnpicklingError(f'GLOBAL getattr({getattr(owner, "__name__", owner)},{name})')
    return getattr(HistoryBuffer, name)


def _named(name: str, function):
    """`function` for what a file calls `name`: torch compares the module and the name of what is listed."""
    alias = partial(function)
    alias.__module__, _, alias.__name__ = name.rpartition('.')
    alias.__qualname__ = alias.__name__  # which newer torch reads
    return alias


_arrays, _scalars = np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0]
_LISTED = [
    FoldedAway,
    HistoryBuffer, _named('builtins.getattr', _statistic), slice, argparse.Namespace, torch.torch_version.TorchVersion,
    np.ndarray, np.dtype, *{type(np.dtype(code)) for code in '?bBhHiIlLqQefdgSU'},
    # As numpy 1 and numpy 2 call them.
    *(_named(f'numpy.{core}.multiarray.{name}', function) for core in ('core', '_core')
      for name, function in (('_reconstruct', _arrays), ('scalar', _scalars)))]
