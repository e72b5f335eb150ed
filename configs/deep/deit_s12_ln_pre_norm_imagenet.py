# DeiT-S with 12 layers on ImageNet-1K from scratch, with the published recipe; the total batch of 1024 is 4 GPUs x 256
# pictures, and `--auto-scale-lr` fits other batches.
_base_ = ['mmpretrain::deit/deit-small_4xb256_in1k.py', '../_base_/mmunorm.py']

model = dict(
    backbone=dict(
        type='UNVisionTransformer',
        arch=dict(_delete_=True, embed_dims=384, num_layers=12, num_heads=6, feedforward_channels=1536),
        norm_cfg=dict(type='LN', eps=1e-6),
        residual_cfg=dict(type='PreNorm')))

default_hooks = dict(checkpoint=dict(max_keep_ckpts=3))
