# DeiT-S from mmpretrain's public LayerNorm checkpoint, in 20 epochs. First, with `teacher` below downloaded:
#   python tools/convert_norms.py mmpretrain::deit/deit-small_4xb256_in1k.py TEACHER --out work_dirs/converted
# The total batch of 1024 is 4 GPUs x 256 images; `--auto-scale-lr` fits other batches.
_base_ = ['mmpretrain::deit/deit-small_4xb256_in1k.py', '../_base_/mmunorm.py']

teacher = 'https://download.openmmlab.com/mmclassification/v0/deit/' \
    'deit-small_pt-4xb256_in1k_20220218-9425b9bb.pth'
load_from = 'work_dirs/converted/deit-small_4xb256_in1k_un.pth'
model = dict(backbone=dict(norm_cfg=dict(type='UN', window=4)))
# The LayerNorms of a Vision Transformer have a smaller eps.
custom_hooks = [dict(type='DistillationHook', checkpoint=teacher, norm_cfg=dict(type='LN', eps=1e-6))]

optim_wrapper = dict(optimizer=dict(lr=2e-5), clip_grad=dict(max_norm=1.0))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=True, end=1, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=2e-7, by_epoch=True, begin=1, end=20, convert_to_iter_based=True),
]
train_cfg = dict(max_epochs=20)
default_hooks = dict(checkpoint=dict(max_keep_ckpts=3))
