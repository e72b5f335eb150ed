"""Compatibility with torch 2.1 and newer. Other modules use only features that every release has."""
from __future__ import annotations

import sys
import tarfile
import zipfile

import torch

# A private function before 2.3.
is_compiling = getattr(torch.compiler, 'is_compiling', None) or torch._utils.is_compiling

# The device-agnostic gradient scaler; before 2.3 there is only CUDA's.
GradScaler = getattr(torch.amp, 'GradScaler', torch.cuda.amp.GradScaler)


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


# Adds objects to what `torch.load(weights_only=True)` reads; before 2.4 it reads tensors and plain data alone.
add_safe_globals = getattr(torch.serialization, 'add_safe_globals', list)


def is_program(path: str) -> bool:
    """Whether a file is of a format that `torch.load` reads without its unpickler, which 2.5 and older do not refuse.

    These are TorchScript, and the tar files of torch 0.1.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith('/constants.pkl') for name in archive.namelist())
    return tarfile.is_tarfile(path)
