"""Refuses calls of a part of a folded model, which would return tokens without a norm, or in another basis.

What a folded norm returns is complete after the layers that it was folded into, and the tokens of a rotated residual
stream after the norms that read it. The scope of a norm is the innermost module whose calls ran all of these in the
examples. Hooks of that module note that it runs; a norm that runs outside of its scope raises an error.
"""
from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar

from torch import fx, nn

from ..compat import in_backward_pass, is_compiling

_running: ContextVar[tuple[Scope, ...]] = ContextVar('running', default=())
_ADVICE = ('Fold with an example that calls what you need, such as example=[images, lambda model: '
           'model.forward_features(images)], or call mmunorm.fusion.allow_partial_calls(model), and see '
           'mmunorm.fusion.streams_of(model)')


class Scope:
    """A module that runs norms together with all that they were folded into.

    Args:
        name, kind: its full name and class.
        layers: by full name relative to it, the layers that hold its norms, and one norm of each.
    """

    def __init__(self, name: str, kind: str, layers: Mapping[str, str]):
        self.name, self.kind, self.layers = name, kind, dict(layers)

    def enter(self, module: nn.Module, args) -> None:
        """The forward pre-hook."""
        if not is_compiling():
            for layer in [layer for layer in self.layers if _is_replaced(module, layer)]:
                warnings.warn(f'{layer} of {self.kind} was replaced after folding. It held the norm '
                              f'{self.layers.pop(layer)}: what is in its place gets features that lack this norm. '
                              'Replace the layer before fuse_norms()', stacklevel=4)
            for layer, norm in [*self.layers.items()]:
                part = _part(module, norm)  # an identity may be taken out
                if part is not None and not getattr(part, 'is_folded', False):
                    warnings.warn(f'{norm} of {self.kind} was replaced after folding. {layer} still holds what was '
                                  'there, which now acts twice. Replace it before fuse_norms()', stacklevel=4)
                    del self.layers[layer]
            _running.set((*_running.get(), self))

    def leave(self, module: nn.Module, args, output) -> None:
        """The forward hook, which is called after errors, too."""
        if not is_compiling() and self in (running := [*_running.get()]):
            running.remove(self)
            _running.set(tuple(running))


class _Scriptable:
    """TorchScript asks a module for `__prepare_scriptable__`, and would compile hooks."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __call__(self) -> nn.Module:
        module = copy.copy(self.module)
        del vars(module)['__prepare_scriptable__']
        vars(module)['_modules'] = dict(module._modules)
        for name in ('_forward_pre_hooks', '_forward_hooks'):
            vars(module)[name] = type(vars(module)[name])(
                (key, hook) for key, hook in vars(module)[name].items()
                if not isinstance(getattr(hook, '__self__', None), Scope))
        return module


HELD = 'folded_norms'  # the attribute of a layer that names the norms that it holds


def set_scopes(model: nn.Module, scopes: Mapping[str, str]) -> None:
    """Sets the scopes of folded norms, both by full name. Layers that hold norms have the attribute `HELD`."""
    held = held_norms(model)
    made: dict[str, Scope] = {}
    for norm, name in scopes.items():
        if name not in made:
            module, prefix = model.get_submodule(name), f'{name}.' if name else ''
            layers = {layer.removeprefix(prefix): norms[0].removeprefix(prefix) for layer, norms in held.items()
                      if layer.startswith(prefix) and any(scopes.get(other) == name for other in norms)}
            made[name] = scope = Scope(name, type(module).__name__, layers)
            module.register_forward_pre_hook(scope.enter)
            module.register_forward_hook(scope.leave, always_call=True)
            vars(module)['__prepare_scriptable__'] = _Scriptable(module)
        model.get_submodule(norm).scope = made[name]


def scopes_of(model: nn.Module) -> dict[str, str]:
    """The scopes of the norms of a folded model, both by full name."""
    return {name: module.scope.name for name, module in model.named_modules()
            if isinstance(getattr(module, 'scope', None), Scope)}


def held_norms(model: nn.Module) -> dict[str, list[str]]:
    """The layers of a model that hold norms, and these, by full name."""
    return {name: list(vars(layer)[HELD]) for name, layer in model.named_modules() if HELD in vars(layer)}


def hold(model: nn.Module, norms: Mapping[str, list[str]]) -> None:
    """Notes in layers, by full name, which norms they hold. It is a warning to replace such a layer."""
    for name, held in norms.items():
        layer = model.get_submodule(name)
        setattr(layer, HELD, tuple(dict.fromkeys((*getattr(layer, HELD, ()), *held))))


def _is_replaced(module: nn.Module, name: str) -> bool:
    """Whether a layer is gone, and what is in its place is no other form of it, such as a quantized one."""
    layer = _part(module, name)
    if layer is not None and any(HELD in vars(part) for part in layer.modules()):
        return False
    return not (hasattr(layer, 'in_features') or hasattr(layer, 'in_channels')) or type(layer) in (
        nn.Linear, nn.Conv2d, nn.Conv1d)


def _part(module: nn.Module, name: str) -> nn.Module | None:
    with suppress(AttributeError):
        return module.get_submodule(name)
    return None


def allow_partial_calls(model: nn.Module) -> None:
    """Lets parts of a folded model run alone, in place. `mmunorm.fusion.streams_of(model)` restores their tokens."""
    for module in model.modules():
        vars(module).pop('scope', None)
        for hook in [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, RefusedHiddenStates)]:
            hook.is_active = False


def check_scope(norm: nn.Module, x) -> None:
    """Raises a RuntimeError if the scope of a norm, which gets `x`, is not running."""
    scope = norm.scope
    if scope is None or is_compiling() or isinstance(x, fx.Proxy) or scope in _running.get() or in_backward_pass():
        return
    whole = f'{scope.name} ({scope.kind})' if scope.name else scope.kind
    raise RuntimeError(f'a part of the folded model runs without all of {whole}: it may return tokens that lack a '
                       f'norm, which fuse_norms has folded into other layers, or that are in another basis. {_ADVICE}')


class RefusedHiddenStates:
    """A forward pre-hook that refuses `output_hidden_states` of rotated streams."""
    is_active = True

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        wanted = kwargs.get('output_hidden_states')
        if self.is_active and (module.config.output_hidden_states if wanted is None else wanted):
            raise RuntimeError('output_hidden_states: fuse_norms has rotated these tokens. Fold without rotate, or '
                               'with an example that asks for them, such as example=dict(pixel_values=images, '
                               'output_hidden_states=True), or call mmunorm.fusion.allow_partial_calls(model), and see '
                               'mmunorm.fusion.streams_of(model)')


def hugging_face_models(model: nn.Module) -> list[nn.Module]:
    """The models of transformers in a model."""
    return [module for module in model.modules()
            if any(cls.__name__ == 'PreTrainedModel' for cls in type(module).__mro__)]


def refuse_hidden_states(model: nn.Module) -> None:
    """Makes `output_hidden_states` of transformers' models an error."""
    for module in hugging_face_models(model):
        if not any(isinstance(hook, RefusedHiddenStates) for hook in module._forward_pre_hooks.values()):
            module.register_forward_pre_hook(RefusedHiddenStates(), with_kwargs=True)
