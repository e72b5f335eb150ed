"""Short runs of mmengine's Runner with a tiny Vision Transformer."""
import torch
from mmengine.model import BaseModel

from projects.deep.deep import UNVisionTransformer
from tests.runs import loader, runner


class BackboneModel(BaseModel):
    """A tiny Vision Transformer."""

    def __init__(self, residual_cfg):
        super().__init__()
        arch = dict(embed_dims=8, num_layers=2, num_heads=2, feedforward_channels=12)
        self.backbone = UNVisionTransformer(arch, img_size=16, patch_size=8, norm_cfg=dict(type='LN'),
                                            residual_cfg=residual_cfg)

    def forward(self, x, mode='loss'):
        return dict(loss=(self.backbone(x)[0] - 1).square().sum())


def backbone_runner(work_dir, max_iters, residual_cfg=None, optim_wrapper=None, **kwargs):
    """A run of the tiny Vision Transformer on images of noise."""
    torch.manual_seed(0)
    model = BackboneModel(residual_cfg or dict(type='PreNorm'))
    data = loader([dict(x=torch.randn(3, 16, 16)) for _ in range(8)])
    return runner(work_dir, model, data, max_iters, randomness=dict(seed=0),
                  optim_wrapper={'optimizer': dict(type='Adam', lr=0.01), **(optim_wrapper or {})}, **kwargs)
