"""Runs of mmengine's Runner with a tiny Vision Transformer, a few steps on pictures of noise."""
import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner

from mmunorm.backbones import UNVisionTransformer


class Model(BaseModel):

    def __init__(self, residual_cfg):
        super().__init__()
        arch = dict(embed_dims=8, num_layers=2, num_heads=2, feedforward_channels=12)
        self.backbone = UNVisionTransformer(arch, img_size=16, patch_size=8, norm_cfg=dict(type='LN'),
                                            residual_cfg=residual_cfg)

    def forward(self, x, mode='loss'):
        return dict(loss=(self.backbone(x)[0] - 1).square().sum())


def runner(work_dir, max_iters, residual_cfg=None, hooks=(), optim_wrapper=None, **kwargs):
    """Of `max_iters` steps with batches of 2; a checkpoint every 6 steps."""
    torch.manual_seed(0)
    return Runner(
        model=Model(residual_cfg or dict(type='PreNorm')),
        work_dir=str(work_dir),
        train_dataloader=dict(batch_size=2, dataset=[dict(x=torch.randn(3, 16, 16)) for _ in range(8)],
                              sampler=dict(type='DefaultSampler', shuffle=False),
                              collate_fn=dict(type='default_collate')),
        train_cfg=dict(by_epoch=False, max_iters=max_iters),
        optim_wrapper={'optimizer': dict(type='Adam', lr=0.01), **(optim_wrapper or {})},
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=6, by_epoch=False)),
        custom_hooks=[hook if isinstance(hook, dict) else dict(type=hook) for hook in hooks],
        experiment_name=work_dir.name,
        **kwargs)
