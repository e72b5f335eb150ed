"""Repeats forward passes that begin alike, without computing their beginning again."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial

from torch import Tensor, nn

# Bytes that a Replay keeps at most.
MEMORY = 2 * 2**30


class Replay:
    """In a `with` block, parts of a model that finished in an earlier pass return the output of that pass.

    A part is a module that holds one of `norms`. Its output is kept if the part finishes before :meth:`freeze` is
    called. The output of a larger part replaces those of the parts inside. An output that another module writes to in
    place is computed again, and so is one for which `memory` bytes have no room. Passes must be repeatable: eval mode,
    no random numbers, and modules that pass nothing on except what they return. `norms` will change between passes.
    """

    def __init__(self, model: nn.Module, norms: Collection[nn.Module], memory: int = MEMORY):
        norms = set(norms)
        self._parts = {name: module for name, module in model.named_modules()
                       if name and module not in norms and 'forward' not in vars(module)
                       and not norms.isdisjoint(module.modules())}
        self._left = memory
        self._kept: dict[int, dict[tuple, tuple]] = {}  # by pass, then by path: output, versions, bytes
        self._changing: set[tuple] = set()  # paths of outputs that are written to

    def __enter__(self) -> Replay:
        for name, module in self._parts.items():
            module.forward = partial(self._call, name, module.forward)
        return self

    def __exit__(self, *error) -> None:
        for module in self._parts.values():
            del module.forward
        self._kept.clear()

    def start(self, index: int) -> None:
        """To be called before each pass; passes that are to begin alike have one index."""
        self._now = self._kept.setdefault(index, {})
        self._keeps = True
        # Calls that are under way: the path of each, and how often it has called each part.
        self._frames: list[tuple[tuple, Counter]] = [((index, ), Counter())]

    def freeze(self) -> None:
        """From here on, nothing in this pass is kept: it will be different next time."""
        self._keeps = False

    def _call(self, name: str, forward: Callable, *args, **kwargs):
        caller, calls = self._frames[-1]
        path = (*caller, (name, calls[name]))
        calls[name] += 1
        if path in self._now:
            output, versions, _ = self._now[path]
            if versions == [tensor._version for tensor in _tensors(output)]:
                return output
            self._forget(path)
            self._changing.add(path)
        self._frames.append((path, Counter()))
        output = forward(*args, **kwargs)
        self._frames.pop()
        if self._keeps and path not in self._changing:
            self._keep(path, output)
        return output

    def _keep(self, path: tuple, output) -> None:
        tensors = _tensors(output)
        if not tensors or any(tensor.is_inference() for tensor in tensors):
            return
        size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        for inner in [inner for inner in self._now if inner[:len(path)] == path]:
            self._forget(inner)
        if size <= self._left:
            self._left -= size
            self._now[path] = output, [tensor._version for tensor in tensors], size

    def _forget(self, path: tuple) -> None:
        self._left += self._now.pop(path)[-1]


def _tensors(output) -> list[Tensor]:
    """The tensors of an output that nobody can change but through them; none if there may be more to it."""
    if isinstance(output, Tensor):
        return [output]
    if not isinstance(output, tuple):
        return []
    parts = [_tensors(part) if isinstance(part, (Tensor, tuple)) else part for part in output]
    if any(not isinstance(part, (list, int, float, str, type(None))) for part in parts):
        return []
    return [tensor for part in parts if isinstance(part, list) for tensor in part]
