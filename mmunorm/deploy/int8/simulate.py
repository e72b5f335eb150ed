"""A model with few bits, as far as floating point can show it: for 6 bits, which no runtime has, and for training."""
from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...fusion.algebra import is_conv
from .forms import reads_single_tokens, tokens_of
from .noise import best_range, quantize, quantize_weight, value_range


@torch.no_grad()
def simulate(model: nn.Module, samples: Sequence[tuple[np.ndarray, ...]], bits: int,
             trainable: bool = False) -> nn.Module:
    """A copy of a model whose linear layers and convolutions read and multiply with so many bits.

    Args:
        model (nn.Module): in eval mode; unchanged.
        samples (Sequence[tuple[np.ndarray, ...]]): batches of the inputs of :func:`mmunorm.deploy.graphs.graph_of`,
            for the ranges of activations.
        bits (int): of activations and weights.
        trainable (bool): keep the weights as they are, and round them in each forward pass; gradients go through the
            rounding (arXiv 1308.3432). :func:`trained_weights` gives the model without that. Defaults to False.
    """
    model = copy.deepcopy(model)
    layers = {name: module for name, module in model.named_modules()
              if isinstance(module, nn.Linear) or is_conv(module)}
    tokens = tokens_of(model, list(layers), samples)
    for name, layer in layers.items():
        if name not in tokens:  # it does not run at inference
            continue
        ends = (best_range(tokens[name], layer.weight.flatten(1), bits) if reads_single_tokens(layer)
                else value_range(tokens[name], 0.))
        if trainable:
            parametrize.register_parametrization(layer, 'weight', _Rounded(bits))
        else:
            layer.weight.copy_(quantize_weight(layer.weight, bits))
        layer.register_forward_pre_hook(lambda module, args, ends=ends: (quantize(args[0], *ends, bits), ))
    return model


class _Rounded(nn.Module):
    """A weight as the quantizer will have it."""

    def __init__(self, bits: int):
        super().__init__()
        self.bits = bits

    def forward(self, weight: Tensor) -> Tensor:
        return quantize_weight(weight, self.bits)


def trained_weights(simulated: nn.Module) -> dict[str, Tensor]:
    """The weights of a model that `simulate(..., trainable=True)` gave, under the names of the model itself."""
    return {name.replace('.parametrizations.weight.original', '.weight'): value
            for name, value in simulated.state_dict().items()}
