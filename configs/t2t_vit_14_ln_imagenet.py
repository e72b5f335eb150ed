# T2T-ViT-14 on ImageNet-1K, 300 epochs from scratch, its published recipe without the 10 epochs of
# cool-down that mmpretrain's config adds; the total batch of 512 is
# 8 GPUs x 64 images, and `--auto-scale-lr` fits other batches.
_base_ = [
    './_base_/t2t_vit_14.py', 'mmpretrain::_base_/datasets/imagenet_bs64_t2t_224.py',
    'mmpretrain::_base_/default_runtime.py', './_base_/mmunorm.py'
]

optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=5e-4, weight_decay=0.05),
    paramwise_cfg=dict(
        norm_decay_mult=0.0, bias_decay_mult=0.0, custom_keys={'cls_token': dict(decay_mult=0.0)}))

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=True, end=10, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', T_max=290, eta_min=1e-5, by_epoch=True, begin=10, end=300),
]

train_cfg = dict(by_epoch=True, max_epochs=300, val_interval=1)
val_cfg = dict()
test_cfg = dict()

# The averaged weights are validated and saved; the statistics of the norms are averaged with them.
custom_hooks = [
    dict(type='EMAHook', momentum=4e-5, update_buffers=True, priority='ABOVE_NORMAL')
]
default_hooks = dict(checkpoint=dict(max_keep_ckpts=3))

auto_scale_lr = dict(base_batch_size=512)
