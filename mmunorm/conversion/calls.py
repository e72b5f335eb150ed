"""Hooks and recordings of the calls of a model's modules."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ..modules import map_tensors


@contextmanager
def hooked(modules: Iterable[nn.Module], hook: Callable, before: bool = False) -> Iterator[None]:
    """A context in which `hook` is called with module, arguments, keyword arguments and output of each call of modules.

    With `before`, it is called before the module and without an output.
    """
    handles = [(module.register_forward_pre_hook if before else module.register_forward_hook)(hook, with_kwargs=True)
               for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def record_calls(model: nn.Module, names: Iterable[str]) -> Iterator[list[tuple[str, tuple, dict, object]]]:
    """A context that records name, arguments, keyword arguments and output of each call of these modules in a list.

    Arguments and outputs are copied, because they may be changed in place later.
    """
    calls, modules = [], {model.get_submodule(name): name for name in names}
    with hooked(modules, lambda module, *call: calls.append((modules[module], *map_tensors(Tensor.clone, call)))):
        yield calls
