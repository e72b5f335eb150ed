# Swin-T from mmpretrain's public LayerNorm checkpoint, in 20 epochs. First, with `teacher` below downloaded:
#   python tools/convert_norms.py configs/swin_t_ln_imagenet.py TEACHER --out work_dirs/converted
# The total batch of 1024 is 16 GPUs x 64 images; `--auto-scale-lr` fits other batches.
_base_ = ['../swin_t_un_imagenet.py']

teacher = 'https://download.openmmlab.com/mmclassification/v0/swin-transformer/' \
    'swin_tiny_224_b16x64_300e_imagenet_20210616_090925-66df6be6.pth'
load_from = 'work_dirs/converted/swin_t_un_imagenet.pth'
custom_hooks = [dict(type='DistillationHook', checkpoint=teacher)]

optim_wrapper = dict(optimizer=dict(lr=2e-5), clip_grad=dict(max_norm=1.0))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=True, end=1, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=2e-7, by_epoch=True, begin=1, end=20, convert_to_iter_based=True),
]
train_cfg = dict(max_epochs=20)
