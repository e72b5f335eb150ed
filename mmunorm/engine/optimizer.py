"""Optimizer constructors that treat the norms of this package like LayerNorm."""
from __future__ import annotations

from mmengine.optim import DefaultOptimWrapperConstructor as _StockConstructor
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from mmpretrain.engine.optimizers import LearningRateDecayOptimWrapperConstructor as _StockLayerDecay
from mmpretrain.registry import OPTIM_WRAPPER_CONSTRUCTORS as MMPRETRAIN_CONSTRUCTORS
from torch import nn

from ..norms import Norm


class _TreatsAsLayerNorm:
    """Applies `norm_decay_mult` to mmunorm's norms, and to modules with `decays_like_norm`.

    The stock constructors recognize norms by their classes (BatchNorm, GroupNorm, LayerNorm, ...) and miss others.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # A ConfigDict makes ConfigDicts of the parameter groups, on which Dynamo of torch 2.14 fails in Adam's step.
        self.optimizer_cfg = dict(self.optimizer_cfg)

    def add_params(self, params, module, *args, **kwargs):
        if isinstance(module, Norm) or getattr(module, 'decays_like_norm', False):
            module = _as_layer_norm(module)
        super().add_params(params, module, *args, **kwargs)


# They replace the stock constructors of the same names: a config that only swaps `norm_cfg` names no other, and the
# stock one would decay gamma to zero. mmdet's layer decay goes by shapes and needs no replacement.
@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class DefaultOptimWrapperConstructor(_TreatsAsLayerNorm, _StockConstructor):
    """mmengine's constructor, which recognizes the norms of this package."""


@MMPRETRAIN_CONSTRUCTORS.register_module(force=True)
class LearningRateDecayOptimWrapperConstructor(_TreatsAsLayerNorm, _StockLayerDecay):
    """mmpretrain's constructor for layer-wise learning rates, which recognizes the norms of this package."""


def _as_layer_norm(module: nn.Module) -> nn.LayerNorm:
    """A LayerNorm with the module's own parameters and children, for rules that go by the class."""
    shell = nn.LayerNorm(1, elementwise_affine=False)
    for name, parameter in module.named_parameters(recurse=False):
        shell.register_parameter(name, parameter)
    for name, child in module.named_children():
        shell.add_module(name, child)
    return shell
