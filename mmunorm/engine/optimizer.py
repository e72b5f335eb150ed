"""Gives our norms and residual connections the weight decay of LayerNorm, by the stock constructors' own rules."""
from __future__ import annotations

from mmengine.optim import DefaultOptimWrapperConstructor as _StockConstructor
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from mmpretrain.engine.optimizers import LearningRateDecayOptimWrapperConstructor as _StockLayerDecay
from mmpretrain.registry import OPTIM_WRAPPER_CONSTRUCTORS as MMPRETRAIN_CONSTRUCTORS
from torch import nn

from ..norms import Norm
from ..residuals import HeadScale, Residual


class _KnowsOurNorms:
    """Counts mmunorm's norms, and the learned factors of residual connections, among the norms.

    The stock constructors recognize a norm by its class (BatchNorm, GroupNorm, LayerNorm, ...). Their
    `norm_decay_mult` misses all other norms. The arguments and everything else are the stock ones.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # As a ConfigDict it would make such of the parameter groups. Dynamo of torch 2.14 fails on them in Adam's step.
        self.optimizer_cfg = dict(self.optimizer_cfg)

    def add_params(self, params, module, *args, **kwargs):
        if isinstance(module, (Norm, Residual, HeadScale)):
            module = _as_layer_norm(module)
        super().add_params(params, module, *args, **kwargs)


# These replace the stock constructors of the same names. A user's config that only swaps `norm_cfg` names no
# other constructor, and the stock one would pull gamma to zero. mmdet's own layer decay goes by shapes: it needs
# no replacement.
@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class DefaultOptimWrapperConstructor(_KnowsOurNorms, _StockConstructor):
    """mmengine's constructor, which counts our norms among the norms."""


@MMPRETRAIN_CONSTRUCTORS.register_module(force=True)
class LearningRateDecayOptimWrapperConstructor(_KnowsOurNorms, _StockLayerDecay):
    """mmpretrain's constructor for layer-wise learning rates, which counts our norms among the norms."""


def _as_layer_norm(module: nn.Module) -> nn.LayerNorm:
    """A LayerNorm that holds the module's own parameters and children, for rules that go by the class."""
    shell = nn.LayerNorm(1, elementwise_affine=False)
    for name, parameter in module.named_parameters(recurse=False):
        shell.register_parameter(name, parameter)
    for name, child in module.named_children():
        shell.add_module(name, child)
    return shell
