"""Hooks and recordings of the calls of a model's modules."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def watched(modules: Iterable[nn.Module], hook: Callable[[nn.Module, tuple, dict, object], object]) -> Iterator[None]:
    """A context in which `hook` is called with module, arguments and output at each call of the modules."""
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recorded(model: nn.Module, names: Iterable[str]) -> Iterator[list[tuple[str, tuple, dict, object]]]:
    """A context that records name, arguments, keyword arguments and output of each call of these modules in a list.

    Arguments and outputs are copied, because they may be changed in place later.
    """
    calls, modules = [], {model.get_submodule(name): name for name in names}
    with watched(modules, lambda module, *call: calls.append((modules[module], *map(_copied, call)))):
        yield calls


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
