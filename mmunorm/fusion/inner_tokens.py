"""Refuses methods that return tokens of a residual stream once folding has changed its basis."""
from __future__ import annotations

from torch import nn

# Of timm and DINOv2.
_METHODS = ('forward_intermediates', 'get_intermediate_layers')
_WHY = ('returns tokens of a residual stream, which fuse_norms has changed: they lack their mean or are in another '
        'basis. Fold with layer_norms="affine", or call it before folding')


class RefusedMethod:
    """Takes the place of a method of a folded model; a RuntimeError when it is called."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f'{self.name} {_WHY}')


class RefusedHiddenStates:
    """A forward hook of transformers' models that refuses `output_hidden_states`."""

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        wanted = kwargs.get('output_hidden_states')
        if module.config.output_hidden_states if wanted is None else wanted:
            raise RuntimeError(f'output_hidden_states {_WHY}')


def refuse_inner_tokens(model: nn.Module) -> None:
    """Makes the methods and options of timm's, DINOv2's and transformers' models that return such tokens an error."""
    for module in model.modules():
        for method in _METHODS:
            if callable(getattr(type(module), method, None)):
                setattr(module, method, RefusedMethod(method))
        is_hugging_face = any(cls.__name__ == 'PreTrainedModel' for cls in type(module).__mro__)
        if is_hugging_face and not any(isinstance(hook, RefusedHiddenStates)
                                       for hook in module._forward_pre_hooks.values()):
            module.register_forward_pre_hook(RefusedHiddenStates(), with_kwargs=True)


def refuses_inner_tokens(model: nn.Module) -> bool:
    """Whether :func:`refuse_inner_tokens` has changed a model."""
    return any(isinstance(hook, (RefusedMethod, RefusedHiddenStates)) for module in model.modules()
               for hook in (*vars(module).values(), *module._forward_pre_hooks.values()))
