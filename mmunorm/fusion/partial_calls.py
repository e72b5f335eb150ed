"""Refuses calls of a part of a folded model, which would return tokens without a norm, or in another basis.

What a folded norm returns is complete after the layers that it was folded into, and the tokens of a changed residual
stream after the norms that read it. The scope of a norm is the innermost module whose call ran all of these in the
examples. A norm that runs outside of a call of its scope raises an error. The mark of a scope is a plain string in the
module and in the norm, so copies, files and replicas have it, too.
"""
from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import FrameType

from torch import nn

from ..compat import in_backward_pass, is_compiling

_MARKS = 'folded_scopes'  # an attribute of modules
_WHOLE = ('forward', 'predict', 'loss')  # methods that run a whole module; the last two are OpenMMLab's
_ADVICE = ('Fold with examples that call what you need, such as '
           'example=[images, lambda model: model.forward_features(images)], or call '
           'mmunorm.fusion.allow_partial_calls(model), and see mmunorm.fusion.streams_of(model)')


def set_scopes(model: nn.Module, scopes: Mapping[str, str]) -> None:
    """Sets the scopes of folded norms, both by full name."""
    for norm, name in scopes.items():
        scope = model.get_submodule(name)
        mark = f'{name} ({type(scope).__name__})'
        setattr(scope, _MARKS, tuple(dict.fromkeys((*vars(scope).get(_MARKS, ()), mark))))
        model.get_submodule(norm).folded_within = mark


def scopes_of(model: nn.Module) -> dict[str, str]:
    """The scopes of the norms of a folded model, both by full name."""
    names = {mark: name for name, module in model.named_modules() for mark in vars(module).get(_MARKS, ())}
    marks = {name: vars(module).get('folded_within') for name, module in model.named_modules()}
    return {name: names[mark] for name, mark in marks.items() if mark in names}


def allow_partial_calls(model: nn.Module) -> None:
    """Lets parts of a folded model run alone, in place. `mmunorm.fusion.streams_of(model)` restores their tokens."""
    for module in model.modules():
        vars(module).pop('folded_within', None)
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, RefusedHiddenStates):
                hook.is_active = False


def check_scope(norm: nn.Module) -> None:
    """Raises a RuntimeError if no method that runs the whole scope of a norm is running."""
    if is_compiling():  # without Python's frames
        return
    for frame in _frames():
        code = frame.f_code
        if code.co_name in _WHOLE and code.co_argcount:
            module = frame.f_locals.get(code.co_varnames[0])
            if norm.folded_within in getattr(module, '__dict__', {}).get(_MARKS, ()):
                return
    if not in_backward_pass():  # which computes a part again
        raise RuntimeError(f'{_call()} runs a part of a folded model: it may return tokens that lack a norm, which '
                           f'fuse_norms has folded into other layers, or that are in another basis. {_ADVICE}')


def _frames() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _call() -> str:
    """The outermost method of a module that is running."""
    *_, frame = (frame for frame in _frames() if isinstance(frame.f_locals.get('self'), nn.Module)
                 and frame.f_globals.get('__name__') != 'torch.nn.modules.module')
    return f'{type(frame.f_locals["self"]).__name__}.{frame.f_code.co_name}'


class RefusedHiddenStates:
    """A forward hook of transformers' models that refuses `output_hidden_states`."""
    is_active = True

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        wanted = kwargs.get('output_hidden_states')
        if self.is_active and (module.config.output_hidden_states if wanted is None else wanted):
            raise RuntimeError('output_hidden_states returns tokens of a residual stream that fuse_norms has changed: '
                               f'they lack their mean or are in another basis. {_ADVICE}')


def refuse_hidden_states(model: nn.Module) -> None:
    """Makes `output_hidden_states` of transformers' models an error."""
    for module in model.modules():
        is_hugging_face = any(cls.__name__ == 'PreTrainedModel' for cls in type(module).__mro__)
        if is_hugging_face and not any(isinstance(hook, RefusedHiddenStates)
                                       for hook in module._forward_pre_hooks.values()):
            module.register_forward_pre_hook(RefusedHiddenStates(), with_kwargs=True)
