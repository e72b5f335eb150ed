"""Small models with trained-looking LayerNorms, and data for them."""
import torch
from torch import nn

from mmunorm.norms.layers import is_norm


def layer_norm(channels, seed=0, **kwargs):
    """A LayerNorm with random scale and shift."""
    norm = nn.LayerNorm(channels, **kwargs)
    generator = torch.Generator().manual_seed(seed)
    for parameter in norm.parameters():
        parameter.data.normal_(generator=generator)
    return norm


def tokens(*shape, seed=0):
    """Tokens with channels of unlike mean and size, and tokens of unlike size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    size = 0.3 + torch.rand(shape[-1], generator=generator, dtype=torch.float64)
    x = x * size + torch.randn(shape[-1], generator=generator, dtype=torch.float64)
    return (x * (0.5 + torch.rand((*shape[:-1], 1), generator=generator, dtype=torch.float64))).float()


def chain(channels=6, norms=3, kind=layer_norm):
    """Norms with a linear layer after each."""
    layers = []
    for i in range(norms):
        layers += [kind(channels, i), nn.Linear(channels, channels)]
    return nn.Sequential(*layers)


def norms_of(model):
    return {name: module for name, module in model.named_modules() if is_norm(module)}


def assert_same(model, other):
    """The same weights and statistics, to the last bit."""
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)
