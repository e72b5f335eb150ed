"""What the modules of a model are called with and return."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def watched(modules: Iterable[nn.Module], hook: Callable[[nn.Module, tuple, dict, object], object]) -> Iterator[None]:
    """Inside, `hook` gets the module, the arguments and the output of each call."""
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recorded(model: nn.Module, names: Iterable[str]) -> Iterator[list[tuple[str, tuple, dict, object]]]:
    """Inside, the list gets name, arguments, keyword arguments and output of each call of these modules.

    Arguments and outputs are copies: they may be changed in place afterwards.
    """
    calls, modules = [], {model.get_submodule(name): name for name in names}
    with watched(modules, lambda module, *call: calls.append((modules[module], *map(_copied, call)))):
        yield calls


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Inside, models are in eval mode; afterwards each of their modules is in its own mode."""
    modes = {module: module.training for model in models for module in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def tensors_of(value) -> list[Tensor]:
    """The tensors in a value, also in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for part in value for tensor in tensors_of(part)]


def _copied(value):
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (tuple, list) else value
