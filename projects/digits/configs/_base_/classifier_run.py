# Training schedule of the digits classifiers, for any data.
_base_ = ['mmpretrain::_base_/default_runtime.py', './digits.py']

optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05),
    clip_grad=dict(max_norm=5.0),
    paramwise_cfg=dict(norm_decay_mult=0., bias_decay_mult=0., flat_decay_mult=0.))

param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=True, end=1, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, begin=1, convert_to_iter_based=True),
]

train_cfg = dict(by_epoch=True, max_epochs=8, val_interval=2)
val_cfg = dict()
test_cfg = dict()

default_hooks = dict(
    logger=dict(type='LoggerHook', interval=20),
    checkpoint=dict(type='CheckpointHook', interval=2, max_keep_ckpts=2))
randomness = dict(seed=0)
