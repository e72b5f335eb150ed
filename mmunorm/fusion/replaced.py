"""A warning where a layer that a norm was folded into is replaced: what comes next gets features without that norm."""
from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

NEAR = 0.05  # relative difference of a layer's weight and its copy, such as one in another dtype
_NORMS = 'folded_norms'  # an attribute of a layer
_hooks: list = []


def note_norms(model: nn.Module, norms: Mapping[str, Iterable[str]]) -> None:
    """Notes in layers, by full name, which norms they hold. From then on, replacing one of them is a warning.

    This is so for copies of the model, too. Putting a layer into another one is no warning, nor is exchanging it for
    one with about the same weight, or for one of another class, such as a quantized layer.
    """
    for name, held in norms.items():
        layer = model.get_submodule(name)
        setattr(layer, _NORMS, tuple(dict.fromkeys((*getattr(layer, _NORMS, ()), *held))))
    watch_layers()


def watch_layers() -> None:
    """Registers the hook that warns."""
    if not _hooks:
        _hooks.append(register_module_module_registration_hook(_warn_if_replaced))


def noted_norms(model: nn.Module) -> dict[str, list[str]]:
    """The layers of a model that hold norms, and these, by full name."""
    return {name: list(vars(layer)[_NORMS]) for name, layer in model.named_modules() if _NORMS in vars(layer)}


def _warn_if_replaced(parent: nn.Module, name: str, new: nn.Module | None) -> None:
    old = dict(parent.named_children()).get(name)
    norms = vars(old).get(_NORMS) if old is not None else None
    if norms and isinstance(new, nn.Module) and _is_other(new, old):
        warnings.warn(f'{name} of {type(parent).__name__} holds the folded norm {norms[0]}: the {type(new).__name__} '
                      'in its place gets features that are not normalized. Replace the layer before fuse_norms()',
                      stacklevel=3)


def _is_other(new: nn.Module, old: nn.Module) -> bool:
    """Whether a module is, or has, an identity or a layer of the class of `old`, and nothing of `old` itself."""
    parts = list(new.modules())
    if old in parts or not any(isinstance(part, nn.Identity) or type(part) is type(old) for part in parts):
        return False
    weight = next(old.parameters()).detach().flatten()
    same_size = [parameter for parameter in new.parameters() if parameter.numel() == len(weight)]
    return not weight.is_meta and not any(
        (parameter.detach().flatten().to(weight) - weight).norm() <= NEAR * weight.norm() for parameter in same_size)
