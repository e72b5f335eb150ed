"""Weights that keep the second moment, as an `init_cfg` of mmengine."""
from __future__ import annotations

from collections.abc import Sequence

from mmengine.model.weight_init import BaseInit, update_init_info
from mmengine.registry import WEIGHT_INITIALIZERS
from torch import Tensor, nn

from .moments import keep_second_moment_


@WEIGHT_INITIALIZERS.register_module(name='SecondMoment')
class SecondMomentInit(BaseInit):
    """:func:`keep_second_moment_` for `init_cfg`: `dict(type='SecondMoment', layer='Linear', activation='GELU')`.

    Args:
        activation, distribution, mode: as in :func:`keep_second_moment_`.
        bias (float): initial value of the biases. Defaults to 0.
        layer (str | Sequence[str], optional): class names of the layers to initialize.
    """

    def __init__(self, activation: str | None = None, distribution: str = 'normal', mode: str = 'fan_in',
                 bias: float = 0., layer: str | Sequence[str] | None = None):
        super().__init__(bias=bias, layer=layer)
        self.settings = dict(activation=activation, distribution=distribution, mode=mode)

    def __call__(self, module: nn.Module) -> None:
        """Initializes the named layers of `module`."""
        for part in module.modules():
            names = {cls.__name__ for cls in type(part).__mro__}
            weight = getattr(part, 'weight', None)
            has_matrix = isinstance(weight, Tensor) and weight.dim() > 1
            if has_matrix and (self.wholemodule or names & set(self.layer)):
                keep_second_moment_(weight.detach(), **self.settings)
                if getattr(part, 'bias', None) is not None:
                    nn.init.constant_(part.bias, self.bias)
        if hasattr(module, '_params_init_info'):
            update_init_info(module, init_info=self._get_init_info())

    def _get_init_info(self) -> str:
        return f'SecondMomentInit: {self.settings}, bias={self.bias}'
