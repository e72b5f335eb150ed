"""Compatibility with torch 2.1 and newer. Other modules use only features that every release has."""
from __future__ import annotations

import codecs
import inspect
import pickle
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch

# A private function before 2.3.
is_compiling = getattr(torch.compiler, 'is_compiling', None) or torch._utils.is_compiling

# The device-agnostic gradient scaler; before 2.3 there is only CUDA's.
GradScaler = getattr(torch.amp, 'GradScaler', torch.cuda.amp.GradScaler)

# Raised when a GPU is out of memory; before 2.5 there is only CUDA's.
OutOfMemoryError = getattr(torch, 'OutOfMemoryError', torch.cuda.OutOfMemoryError)


def in_backward_pass() -> bool:
    """Whether autograd runs a backward pass in this thread. A forward pass is then a recomputation."""
    if torch._C._current_graph_task_id() != -1:
        return True
    compiled_autograd = sys.modules.get('torch._dynamo.compiled_autograd')  # expensive to import
    return getattr(compiled_autograd, 'in_compiled_autograd_region', False)


def forget_compiled_code() -> None:
    """Resets torch.compile after layers of a model were replaced; torch 2.1 would keep using the old layers."""
    if 'torch._dynamo' in sys.modules:
        torch.compiler.reset()


def guards_attributes() -> bool:
    """Whether torch.compile recompiles when an attribute of a layer changes; 2.1 does not."""
    config = torch._dynamo.config
    return config.guard_nn_modules or getattr(config, 'inline_inbuilt_nn_modules', False)


def allow_recompilations(number: int) -> None:
    """Lets torch.compile compile one function at least `number` times, for different kinds of inputs."""
    config = torch._dynamo.config
    name = 'recompile_limit' if hasattr(config, 'recompile_limit') else 'cache_size_limit'  # before 2.6
    setattr(config, name, max(number, getattr(config, name)))


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float | None) -> torch.Tensor:
    """`weight * x / sqrt(mean over the last dimension of x^2 + eps)`."""
    if hasattr(torch.nn.functional, 'rms_norm'):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    normalized = x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()  # before 2.4
    return normalized if weight is None else weight * normalized


def load_listed(file, map_location, listed: dict[str, object], load: Callable):
    """`torch.load` of tensors, plain data and the objects listed by full name; others raise an UnpicklingError.

    Uses `weights_only=True` where that accepts a list of names (2.7 and newer), else a restricted unpickler.
    """
    if _TAKES_NAMES:
        with _safe_globals(listed):
            return load(file, map_location, weights_only=True)
    return load(file, map_location, pickle_module=_restricted_pickle({**_tensor_globals(), **listed}),
                weights_only=False)


_TAKES_NAMES = 'tuple' in str(inspect.signature(getattr(torch.serialization, 'add_safe_globals', len)))


@contextmanager
def _safe_globals(listed: dict[str, object]) -> Iterator[None]:
    """Sets torch's list of safe globals. An entry of the same name by another package is ignored."""
    lists = torch.serialization
    before = lists.get_safe_globals()
    names = [entry[1] if isinstance(entry, tuple) else f'{entry.__module__}.{entry.__name__}' for entry in before]
    others = [entry for entry, name in zip(before, names, strict=True) if name not in listed]
    lists.clear_safe_globals()
    lists.add_safe_globals([*others, *((value, name) for name, value in listed.items())])
    try:
        yield
    finally:
        lists.clear_safe_globals()
        lists.add_safe_globals(before)


def _restricted_pickle(listed: dict[str, object]) -> SimpleNamespace:
    """The parts of the module `pickle` that torch.load uses."""

    class Unpickler(pickle.Unpickler):

        def find_class(self, module: str, name: str):
            full = f'{module}.{name}'.replace('__builtin__.', 'builtins.')  # as Python 2 called it
            if full not in listed:
                raise pickle.UnpicklingError(f'GLOBAL {full}')
            return listed[full]

    return SimpleNamespace(__name__='pickle', Unpickler=Unpickler,
                           load=lambda file, **kwargs: Unpickler(file, **kwargs).load())


def _tensor_globals() -> dict[str, object]:
    parts = {f'torch.{name}': value for name, value in vars(torch).items()
             if isinstance(value, torch.dtype) or name.endswith('Storage')}
    for name in ('_rebuild_tensor', '_rebuild_tensor_v2', '_rebuild_tensor_v3', '_rebuild_parameter'):
        if hasattr(torch._utils, name):
            parts[f'torch._utils.{name}'] = getattr(torch._utils, name)
    return parts | {
        'builtins.set': set, 'builtins.complex': complex, 'builtins.bytearray': bytearray,
        '_codecs.encode': codecs.encode, 'collections.OrderedDict': OrderedDict, 'collections.Counter': Counter,
        'torch.Size': torch.Size, 'torch.device': torch.device, 'torch.nn.parameter.Parameter': torch.nn.Parameter,
        'torch.storage.TypedStorage': torch.storage.TypedStorage,
        'torch.storage.UntypedStorage': torch.storage.UntypedStorage,
    }
