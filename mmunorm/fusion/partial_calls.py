"""Refuses calls of a part of a folded model, which would return tokens without a norm, or in another basis.

What a folded norm returns is complete after the layers that it was folded into, and the tokens of a changed residual
stream after the norms that read it. The scope of a norm is the innermost module whose call ran all of these in the
examples. A norm that runs outside of a call of its scope raises an error. Of the whole model, the methods that examples
call count as calls. The mark of a scope is a plain string in the module and in the norm, so copies, files and replicas
have it, too.
"""
from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from torch import nn

from ..compat import in_backward_pass, is_compiling

_MARKS = 'folded_scopes'  # an attribute of modules
_GRAPH_OF = 'graph_of_scopes'  # the same of modules whose forward pass runs the parts of a model as its own does
WHOLE = ('forward', 'predict', 'loss')  # methods that run a whole module; the last two are OpenMMLab's
_ADVICE = ('Fold with examples that call what you need, such as '
           'example=[images, lambda model: model.forward_features(images)], or call '
           'mmunorm.fusion.allow_partial_calls(model), and see mmunorm.fusion.streams_of(model)')


def set_scopes(model: nn.Module, scopes: Mapping[str, str], calls: Sequence[str] = WHOLE) -> None:
    """Sets the scopes of folded norms, both by full name; `calls` are the methods that run the whole model."""
    for norm, name in scopes.items():
        model.get_submodule(norm).folded_within = _mark(model.get_submodule(name), name, WHOLE if name else calls)


def _mark(scope: nn.Module, name: str, calls: Sequence[str]) -> str:
    """Marks the module of this full name as a scope that these methods run; returns the mark."""
    mark = f'{name} ({type(scope).__name__}): {", ".join(calls)}'
    setattr(scope, _MARKS, tuple(dict.fromkeys((*vars(scope).get(_MARKS, ()), mark))))
    return mark


def scopes_of(model: nn.Module) -> dict[str, str]:
    """The scopes of the norms of a folded model, both by full name."""
    names = {mark: name for name, module in model.named_modules() for mark in vars(module).get(_MARKS, ())}
    marks = {name: vars(module).get('folded_within') for name, module in model.named_modules()}
    return {name: names[mark] for name, mark in marks.items() if mark in names}


def set_graph_of(graph: nn.Module, model: nn.Module) -> None:
    """Counts forward passes of `graph`, which runs the parts of a folded model in its order, as calls of the model."""
    setattr(graph, _GRAPH_OF, vars(model).get(_MARKS, ()))


def calls_of(model: nn.Module) -> tuple[str, ...]:
    """The methods that run a folded model whole."""
    return next((_calls(mark) for mark in vars(model).get(_MARKS, ()) if mark.startswith(' ')), WHOLE)


def _calls(mark: str) -> tuple[str, ...]:
    return tuple(mark.rpartition(': ')[2].split(', '))


def allow_partial_calls(model: nn.Module) -> None:
    """Lets parts of a folded model run alone, in place. `mmunorm.fusion.streams_of(model)` restores their tokens."""
    for module in model.modules():
        vars(module).pop('folded_within', None)
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, RefusedHiddenStates):
                hook.is_active = False


def check_scope(norm: nn.Module) -> None:
    """Raises a RuntimeError if no method that runs the whole scope of a norm is running."""
    if not _is_running(norm.folded_within) and not in_backward_pass():  # which computes a part again
        raise RuntimeError(f'{_call()} runs a part of a folded model: it may return tokens that lack a norm, which '
                           f'fuse_norms has folded into other layers, or that are in another basis. {_ADVICE}')


def _is_running(mark: str) -> bool:
    """Whether a method that runs the whole of a marked scope is running; also True in compiled code."""
    if is_compiling():  # without Python's frames
        return True
    calls = _calls(mark)
    for frame in _frames():
        code = frame.f_code
        if code.co_name in (*calls, 'forward') and code.co_argcount:
            state = getattr(frame.f_locals.get(code.co_varnames[0]), '__dict__', {})
            if mark in state.get(_GRAPH_OF, ()) or code.co_name in calls and mark in state.get(_MARKS, ()):
                return True
    return False


def _frames() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def running_methods() -> Iterator[tuple[nn.Module, str]]:
    """The modules of which methods are running, and the names of these methods, from the innermost."""
    for frame in _frames():
        module, name = frame.f_locals.get('self'), frame.f_code.co_name
        if (isinstance(module, nn.Module) and frame.f_globals.get('__name__') != 'torch.nn.modules.module'
                and hasattr(module, name)):  # no function around a method
            yield module, name


def _call() -> str:
    """The outermost method of a module that is running."""
    *_, (module, name) = running_methods()
    return f'{type(module).__name__}.{name}'


class RefusedHiddenStates:
    """A forward hook of transformers' models that refuses `output_hidden_states`.

    Args:
        within: the mark of the whole model, which may ask its parts for hidden states; '' for the whole model itself.
    """
    is_active = True

    def __init__(self, within: str):
        self.within = within

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        wanted = kwargs.get('output_hidden_states')
        if wanted is None:
            is_refused = module.config.output_hidden_states
        else:
            is_refused = wanted and not (self.within and _is_running(self.within))
        if is_refused and self.is_active:
            raise RuntimeError('output_hidden_states returns tokens that fuse_norms has changed: they lack a norm or '
                               'their mean, or are in another basis. Fold with an example that asks for them, such as '
                               'example=dict(pixel_values=images, output_hidden_states=True), or call '
                               'mmunorm.fusion.allow_partial_calls(model), and see mmunorm.fusion.streams_of(model)')


def hugging_face_models(model: nn.Module) -> list[nn.Module]:
    """The models of transformers in a model."""
    return [module for module in model.modules()
            if any(cls.__name__ == 'PreTrainedModel' for cls in type(module).__mro__)]


def refuse_hidden_states(model: nn.Module) -> None:
    """Makes `output_hidden_states` of transformers' models an error."""
    whole = _mark(model, '', calls_of(model))
    for module in hugging_face_models(model):
        if not any(isinstance(hook, RefusedHiddenStates) for hook in module._forward_pre_hooks.values()):
            hook = RefusedHiddenStates('' if module is model else whole)
            module.register_forward_pre_hook(hook, with_kwargs=True)


def refuses_hidden_states(model: nn.Module) -> bool:
    """Whether `output_hidden_states` of a model of transformers in a model is an error."""
    return any(isinstance(hook, RefusedHiddenStates) for module in model.modules()
               for hook in module._forward_pre_hooks.values())
