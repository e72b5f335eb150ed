# DeiT-S from mmpretrain's public LayerNorm checkpoint in 20 epochs: its norms fade one after the other. The total batch
# of 1024 is 4 GPUs x 256 pictures, and `--auto-scale-lr` fits other batches.
_base_ = ['mmpretrain::deit/deit-small_4xb256_in1k.py', '../_base_/mmunorm.py']

load_from = 'https://download.openmmlab.com/mmclassification/v0/deit/' \
    'deit-small_pt-4xb256_in1k_20220218-9425b9bb.pth'
# The LayerNorms of a Vision Transformer have a smaller eps.
model = dict(backbone=dict(norm_cfg=dict(type='FadingUN', window=4, ln_eps=1e-6)))
custom_hooks = [
    dict(type='FadingHook'),
    dict(type='DistillationHook', checkpoint=load_from, norm_cfg=dict(type='LN', eps=1e-6)),
]

optim_wrapper = dict(optimizer=dict(lr=2e-5), clip_grad=dict(max_norm=1.0))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=True, end=1, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=2e-7, by_epoch=True, begin=1, end=20, convert_to_iter_based=True),
]
train_cfg = dict(max_epochs=20)
default_hooks = dict(checkpoint=dict(max_keep_ckpts=3))
