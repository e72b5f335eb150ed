"""Repeats forward passes with a common beginning without recomputing it."""
from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .calls import tensors_of

# The maximum cache size of a Replay, in bytes.
MEMORY = 2 * 2**30


class Replay(TorchFunctionMode):
    """A context in which parts of a model that finished in an earlier pass return their cached outputs.

    A part is a module that contains one of `norms`. Its output is cached if the part finishes before :meth:`freeze` is
    called and has no side effects: none of its tensors is referenced elsewhere (by a list, an attribute or a hook),
    and neither its inputs nor its buffers were changed in place. Python numbers are not tracked. The output of a
    larger part replaces those of the parts in it. An output is recomputed if another module writes to it in place, or
    if the cache exceeds `memory` bytes. Passes must be deterministic: eval mode, no random numbers. `norms` may change
    between passes.
    """

    def __init__(self, model: nn.Module, norms: Collection[nn.Module], memory: int = MEMORY):
        super().__init__()
        norms = set(norms)
        self._parts = {name: module for name, module in model.named_modules()
                       if name and module not in norms and 'forward' not in vars(module)
                       and not norms.isdisjoint(module.modules())}
        self._left = memory
        self._kept: dict[int, dict[tuple, tuple]] = {}  # by pass, then by path: output, versions, bytes
        self._changing: set[tuple] = set()  # paths of outputs that are written to
        self._made: list[weakref.ref] = []  # the tensors of a pass so far

    def __enter__(self) -> Replay:
        for name, module in self._parts.items():
            module.forward = partial(self._call, name, module, module.forward)
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        for module in self._parts.values():
            del module.forward
        self._kept.clear()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        # `contiguous` and similar functions may return their argument.
        self._made += [weakref.ref(tensor) for tensor in tensors_of(output) if not any(tensor is arg for arg in args)]
        return output

    def start(self, index: int) -> None:
        """Must be called before each pass; passes with a common beginning have the same index."""
        self._now = self._kept.setdefault(index, {})
        self._keeps = True
        # Calls in progress: the path of each, and how often it has called each part.
        self._frames: list[tuple[tuple, Counter]] = [((index, ), Counter())]
        self._made.clear()

    def freeze(self) -> None:
        """Stops caching in this pass, because the rest will differ in the next pass."""
        self._keeps = False

    def _call(self, name: str, module: nn.Module, forward: Callable, *args, **kwargs):
        caller, calls = self._frames[-1]
        path = (*caller, (name, calls[name]))
        calls[name] += 1
        if path in self._now:
            output, versions, _ = self._now[path]
            if versions == _versions(output):
                return _alias(output)
            self._forget(path)
            self._changing.add(path)
        self._frames.append((path, Counter()))
        start, state = len(self._made), (args, kwargs, list(module.buffers()))
        before = _versions(state)
        output = forward(*_alias(args), **{key: _alias(value) for key, value in kwargs.items()})
        self._frames.pop()
        if not self._keeps or path in self._changing:
            return output
        # Only aliases are passed on, so all tensors of the part are freed now unless something else references them,
        # including a list or dict that it returned, which its caller may change.
        end, kept = len(self._made), _alias(output)
        del self._made[end:]  # cached tensors are referenced only here
        returned = _alias(output)
        del output
        left = [tensor for tensor in self._made[start:end] if tensor() is not None]
        self._made[start:end] = left
        if not left and before == _versions(state):
            self._keep(path, kept)
        return returned

    def _keep(self, path: tuple, output) -> None:
        tensors = tensors_of(output)
        if not tensors or any(tensor.is_inference() for tensor in tensors):
            return
        size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        for inner in [inner for inner in self._now if inner[:len(path)] == path]:
            self._forget(inner)
        if size <= self._left:
            self._left -= size
            self._now[path] = output, _versions(output), size

    def _forget(self, path: tuple) -> None:
        self._left += self._now.pop(path)[-1]


def _versions(value) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors_of(value)]


def _alias(value):
    """A tensor, or a tuple of tensors, as new Tensor objects with the same memory; other values unchanged."""
    if isinstance(value, Tensor):
        return value.detach()
    return tuple(map(_alias, value)) if type(value) is tuple else value
