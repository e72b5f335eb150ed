"""Linear layers in the NTK parametrization, also called equalized learning rate (PGGAN, arXiv 1710.10196), and
without biases, as in T5 (arXiv 1910.10683)."""
from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils import parametrize


class NTKScale(nn.Module):
    """`W / sqrt(fan_in)`, as a parametrization of torch: from W, which the optimizer updates, to the layer's weight."""

    def __init__(self, fan_in: int):
        super().__init__()
        self.root = fan_in**0.5

    def forward(self, weight: Tensor) -> Tensor:
        return weight / self.root

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight * self.root


def ntk_parametrize(model: nn.Module) -> nn.Module:
    """Parametrizes each `nn.Linear` of a model as `y = W x / sqrt(fan_in) + b`, in place; returns `model`.

    The layers compute the same. The steps of optimizers that divide by the size of a gradient, such as Adam, change:
    they update W by the learning rate, so the layer's weight by `1 / sqrt(fan_in)` of it. Initial weights of variance
    `1 / fan_in` become `W ~ N(0, 1)`. In a `state_dict`, `weight` is `parametrizations.weight.original`. Call it after
    the weights are initialized and before the optimizer is built.

    Raises:
        ValueError: `model` has no linear layer, or one whose weight is parametrized already.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if not layers:
        raise ValueError(f'model: {type(model).__name__} has no nn.Linear')
    for name, layer in layers.items():
        if parametrize.is_parametrized(layer, 'weight'):
            raise ValueError(f"model: the weight of {name or 'the layer'} is parametrized already")
    for layer in layers.values():
        parametrize.register_parametrization(layer, 'weight', NTKScale(layer.in_features))
    return model


def undo_ntk(model: nn.Module) -> nn.Module:
    """Removes the parametrization of :func:`ntk_parametrize`, in place, before `fuse_norms`; returns `model`."""
    for _, layer in ntk_layers(model):
        parametrize.remove_parametrizations(layer, 'weight', leave_parametrized=True)
    return model


def ntk_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and layers of a model whose only parametrization is :class:`NTKScale` of the weight."""
    return [(name, layer) for name, layer in model.named_modules() if parametrize.is_parametrized(layer) and
            {key: [*map(type, parts)] for key, parts in layer.parametrizations.items()} == dict(weight=[NTKScale])]


def remove_biases(model: nn.Module) -> nn.Module:
    """Removes the bias of every linear layer and convolution of a model, in place; returns `model`.

    Norms keep theirs; `dict(type='RMSN')` has none. `fuse_norms` creates the biases that it needs.
    """
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            module.bias = None
    return model
