# 60 epochs of SGD with a cosine; the batch of 128 is on one GPU.
_base_ = ['mmpretrain::_base_/default_runtime.py']

optim_wrapper = dict(
    optimizer=dict(type='SGD', lr=0.05, momentum=0.9, weight_decay=5e-4),
    paramwise_cfg=dict(norm_decay_mult=0.0))

param_scheduler = dict(
    type='CosineAnnealingLR', T_max=60, by_epoch=True, convert_to_iter_based=True)

train_cfg = dict(by_epoch=True, max_epochs=60, val_interval=1)
val_cfg = dict()
test_cfg = dict()

default_hooks = dict(checkpoint=dict(max_keep_ckpts=3))

auto_scale_lr = dict(base_batch_size=128)
