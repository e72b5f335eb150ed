"""Hooks and recordings of the calls of a model's modules, and readers of their parameters."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..modules import map_tensors, tensors_in


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


class ExternalReaders(TorchFunctionMode):
    """A context that finds the modules whose parameters a function outside of their calls computes with.

    `found` has the name of such a function by module. A parameter of several modules may be read in the call of each.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        super().__init__()
        self.found: dict[nn.Module, str] = {}
        self._owners: dict[Tensor, list[nn.Module]] = defaultdict(list)
        for module in modules:
            for parameter in module.parameters():
                self._owners[parameter].append(module)
        self._running: Counter[nn.Module] = Counter()

    def __enter__(self) -> ExternalReaders:
        modules = {module for owners in self._owners.values() for module in owners}
        self._handles = [handle for module in modules for handle in (
            module.register_forward_pre_hook(lambda module, _: self._running.update([module])),
            module.register_forward_hook(lambda module, *_: self._running.subtract([module])))]
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        name = getattr(function, '__name__', '')
        # Of `x.to(weight)`, `x.type_as(weight)` and the like, the dtype and device count; `weight.dtype` is no tensor.
        read = args[:1] if name in ('to', 'type_as') else () if name.startswith('new_') else (args, kwargs)
        if not name.endswith('_like') and any(True for _ in tensors_in(output)):
            for owners in filter(None, map(self._owners.get, tensors_in(read))):
                if not any(self._running[module] for module in owners):
                    self.found.update(dict.fromkeys(owners, name))
        return output
