"""Runs of mmengine's Runner: a few steps on a few samples in memory."""
import os

import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner

from mmunorm.backbones import UNVisionTransformer


def loader(dataset, batch_size=2, **kwargs):
    """The config of a loader that gives samples in their order."""
    return {'dataset': dataset, 'batch_size': batch_size, 'sampler': dict(type='DefaultSampler', shuffle=False),
            'collate_fn': dict(type='default_collate'), **kwargs}


def runner(work_dir, model, train_dataloader, max_iters=None, hooks=(), interval=6, lr=0.1, **kwargs):
    """A Runner of `max_iters` steps of SGD with a checkpoint every `interval` steps, unless `kwargs` say otherwise."""
    settings = dict(train_cfg=dict(by_epoch=False, max_iters=max_iters),
                    optim_wrapper=dict(optimizer=dict(type='SGD', lr=lr)),
                    default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=interval, by_epoch=False)))
    return Runner(model=model, work_dir=str(work_dir), train_dataloader=train_dataloader,
                  custom_hooks=[dict(type=hook) if isinstance(hook, str) else hook for hook in hooks],
                  experiment_name=os.urandom(8).hex(), **{**settings, **kwargs})


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
    return runner(work_dir, model, data, max_iters,
                  optim_wrapper={'optimizer': dict(type='Adam', lr=0.01), **(optim_wrapper or {})}, **kwargs)
