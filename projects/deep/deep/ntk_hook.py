"""Training in the NTK parametrization."""
from __future__ import annotations

from mmengine.hooks import EMAHook, Hook
from mmengine.registry import HOOKS

from mmunorm.engine.runner import unwrapped_model
from mmunorm.utils import PreflightError

from .init import ntk_parametrize, undo_ntk
from .init.ntk import ntk_layers


@HOOKS.register_module()
class NTKHook(Hook):
    """Applies :func:`.init.ntk_parametrize` during training: `custom_hooks=[dict(type='NTKHook')]`.

    It is a hook, not an `init_cfg`, because the weights must be initialized or loaded before. Checkpoints contain the
    plain weights `W / sqrt(fan_in)`, so testing, folding and all other tools are unaffected. A resumed run computes W
    from these, and continues like an uninterrupted one, except for rounding.

    Raises:
        PreflightError: when training begins: there is an EMAHook, whose averaged model has other parameters, or
            the model has no linear layer.
    """

    def before_train(self, runner) -> None:
        if any(isinstance(hook, EMAHook) for hook in runner.hooks):
            raise PreflightError('custom_hooks: NTKHook and EMAHook cannot be combined: the averaged model would have '
                                 'other parameters than the model. Remove one of them.')
        try:
            # The parameters remain the same objects, those of the optimizer.
            ntk_parametrize(unwrapped_model(runner))
        except ValueError as error:
            raise PreflightError(f'NTKHook: {error}.') from error

    def before_save_checkpoint(self, runner, checkpoint: dict) -> None:
        state = checkpoint['state_dict']
        for name, layer in ntk_layers(unwrapped_model(runner)):
            key = f'{name}.' if name else ''
            original = state.pop(f'{key}parametrizations.weight.original')
            state[f'{key}weight'] = layer.parametrizations.weight[0](original)

    def after_train(self, runner) -> None:
        undo_ntk(unwrapped_model(runner))
