# DeiT-S on ImageNet-1K from scratch, with the published recipe; the total batch of 1024 is 4 GPUs x 256
# images, and `--auto-scale-lr` fits other batches.
# Depth and scheme are options. BranchNorm's T is its paper's; the run has about 375000 updates:
#   --cfg-options model.backbone.arch.num_layers=48 model.backbone.residual_cfg.type=BranchNorm \
#       model.backbone.residual_cfg.warmup_iters=4000
# LayerNorm with DeiT's eps: --norm 'LN=LN,eps=1e-6'
_base_ = ['mmpretrain::deit/deit-small_4xb256_in1k.py', '../../../configs/_base_/mmunorm.py']
custom_imports = dict(imports=['mmunorm', 'projects.deep.deep'], allow_failed_imports=False)

model = dict(
    backbone=dict(
        type='UNVisionTransformer',
        arch=dict(_delete_=True, embed_dims=384, num_layers=12, num_heads=6, feedforward_channels=1536),
        norm_cfg=dict(type='UN', window=4),
        residual_cfg=dict(type='PreNorm')))

default_hooks = dict(checkpoint=dict(max_keep_ckpts=3))
