# IAT on pairs of images (arXiv 2205.14871): L1, Adam, random crops and flips. Recipes set the folders and epochs.
custom_imports = dict(imports=['mmunorm', 'projects.low_light.low_light'], allow_failed_imports=False)
default_scope = 'mmengine'

model = dict(type='ImageEnhancer', backbone=dict(type='IAT', norm_cfg=dict(type='LN')))

train_pipeline = [
    dict(type='LoadPair'),
    dict(type='RandomCropPair', crop_size=(256, 256)),
    dict(type='RandomFlipPair'),
    dict(type='PackPair'),
]
test_pipeline = [dict(type='LoadPair'), dict(type='PackPair')]

train_dataloader = dict(
    batch_size=8,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='PairDataset', pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=1,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='PairDataset', test_mode=True, pipeline=test_pipeline))
test_dataloader = val_dataloader

val_evaluator = dict(type='ImageQuality')
test_evaluator = val_evaluator

train_cfg = dict(by_epoch=True, max_epochs=200, val_interval=10)
val_cfg = dict()
test_cfg = dict()

optim_wrapper = dict(
    optimizer=dict(type='Adam', lr=2e-4, weight_decay=1e-4),
    paramwise_cfg=dict(norm_decay_mult=0., bias_decay_mult=0., flat_decay_mult=0.))
param_scheduler = [dict(type='CosineAnnealingLR', eta_min=1e-6, by_epoch=True, convert_to_iter_based=True)]

default_hooks = dict(
    logger=dict(type='LoggerHook', interval=20),
    checkpoint=dict(type='CheckpointHook', interval=10, max_keep_ckpts=2))
