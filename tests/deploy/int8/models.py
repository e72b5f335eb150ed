"""A small classifier whose norms have the statistics of what they read."""
import torch

from mmunorm.deploy.graphs import graph_of
from mmunorm.norms import OfflineNorm

from ...fusion import models

SHAPE = (37, 45)  # windows are padded


def pictures(number=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    small = torch.rand(number, 3, 6, 6, generator=generator) * 255
    return torch.nn.functional.interpolate(small, SHAPE, mode='bicubic').clamp(0, 255).byte()


def classifier():
    """Folds: one block without a shift, one with, and a patch merging between them."""
    torch.manual_seed(0)
    model = models.swin_classifier(arch=dict(embed_dims=8, depths=[1, 2], num_heads=[2, 4]))
    model.data_preprocessor.register_buffer('mean', torch.full((3, 1, 1), 120.), False)
    model.data_preprocessor.register_buffer('std', torch.full((3, 1, 1), 60.), False)
    model.data_preprocessor._enable_normalize = True
    models.randomize(model, gamma='none')

    def measure(norm, args):
        norm.running_var.copy_(args[0].flatten(0, -2).square().mean(0))

    handles = [module.register_forward_pre_hook(measure) for module in model.modules()
               if isinstance(module, OfflineNorm)]
    with torch.no_grad():
        graph_of(model)(pictures().float())
    for handle in handles:
        handle.remove()
    return model


def samples(batch=2):
    images = pictures().float().numpy()
    return [(images[i:i + batch], ) for i in range(0, len(images), batch)]
