"""Surgery on the modules of a model, its mode and wrappers, and the tensors of a call."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from .compat import forget_compiled_code


def set_submodules(model: nn.Module, norms: Mapping[str, nn.Module]) -> None:
    """Sets modules of a model by full name, in place."""
    for name, norm in norms.items():
        parent, _, child = name.rpartition('.')
        setattr(model.get_submodule(parent), child, norm)
    forget_compiled_code()


def replace_modules(model: nn.Module, is_old: Callable[[nn.Module], bool],
                    new: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Replaces each module that `is_old` selects by what `new` returns for it, in place; returns the model."""
    parts = {name: new(part) for name, part in model.named_modules(remove_duplicate=False) if name and is_old(part)}
    set_submodules(model, dict(reversed(parts.items())))  # the innermost first
    return model


def is_any(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether a module is an instance of one of these classes, whose packages need not be installed."""
    return any(f'{cls.__module__}.{cls.__qualname__}' in names for cls in type(module).__mro__)


def disable_fast_path(model: nn.Module, names: list[str]) -> list[tuple[nn.Module, str, object]]:
    """Makes the `nn.TransformerEncoderLayer`s that hold these norms call them in eval mode, too, in place.

    torch's fast path reads the weights of the norms and computes LayerNorm itself. It is disabled for these layers and
    the `nn.TransformerEncoder`s around them. Returns what was changed: module, attribute and previous value.
    """
    layers = {model.get_submodule(name.rpartition('.')[0]) for name in names}
    layers = {layer for layer in layers if isinstance(layer, nn.TransformerEncoderLayer)}
    encoders = [module for module in model.modules()
                if isinstance(module, nn.TransformerEncoder) and not layers.isdisjoint(module.layers)]
    changes = [(module, name, getattr(module, name))
               for modules, name in ((layers, 'activation_relu_or_gelu'), (encoders, 'use_nested_tensor'))
               for module in modules if hasattr(module, name)]
    for module, name, value in changes:
        setattr(module, name, type(value)(0))
    return changes


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """A context in which models are in eval mode; it restores the mode of each module afterwards."""
    modes = {module: module.training for model in models for module in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without wrappers that only call it: torch.compile's, DDP's, averaged models."""
    while True:
        parts = [name for name, _ in model.named_children()]
        if '_orig_mod' in parts:
            model = model._orig_mod
        elif parts == ['module'] and type(model).__module__.partition('.')[0] in ('torch', 'mmengine'):
            model = model.module
        else:
            return model


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """A context in which compiled parts of a model are the parts themselves, with the names of a model without them."""
    def exchange(name: str, part: nn.Module, other: nn.Module) -> None:
        owner, _, child = name.rpartition('.')
        if getattr(model.get_submodule(owner), child) is part:  # not a norm that has been folded
            setattr(model.get_submodule(owner), child, other)

    compiled = {name: part for name, part in model.named_modules(remove_duplicate=False) if hasattr(part, '_orig_mod')}
    for name, part in reversed(compiled.items()):  # the innermost first
        exchange(name, part, part._orig_mod)
    try:
        yield
    finally:
        for name, part in compiled.items():
            exchange(name, part._orig_mod, part)


def tensors_in(value, depth: int = 6) -> Iterator[Tensor]:
    """The tensors of an argument or output: in containers, and in the attributes of other objects."""
    if isinstance(value, Tensor):
        yield value
    elif depth:
        if not isinstance(value, (tuple, list)):
            value = (value if isinstance(value, Mapping) else getattr(value, '__dict__', {})).values()
        for part in value:
            yield from tensors_in(part, depth - 1)


def map_tensors(function: Callable[[Tensor], object], value):
    """`value` with each tensor in its dicts, tuples and lists replaced by what `function` returns for it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return type(value)(map_tensors(function, item) for item in value) if type(value) in (tuple, list) else value


def refuse_save_pretrained(model: nn.Module, is_changed: Callable[[nn.Module], bool], why: str) -> None:
    """Makes `save_pretrained` of what holds changed parts, such as a model of transformers, an error."""
    for module in model.modules():
        if hasattr(type(module), 'save_pretrained') and any(map(is_changed, module.modules())):
            module.save_pretrained = partial(_refused_save_pretrained, why)


def _refused_save_pretrained(why: str, *args, **kwargs):
    raise RuntimeError(f'save_pretrained: {why}')
