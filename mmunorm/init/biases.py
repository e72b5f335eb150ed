"""Models without biases, as in T5 (arXiv 1910.10683)."""
from __future__ import annotations

from torch import nn


def remove_biases(model: nn.Module) -> nn.Module:
    """Removes the bias of every linear layer and convolution of a model, in place; returns `model`.

    Norms keep theirs: `dict(type='RMSN')` has none. `fuse_norms` makes the biases that it needs.
    """
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            module.bias = None
    return model
