# IAT from its LOL-V1 weights before a Swin-T with UPerNet, trained jointly on the night images of ACDC. It needs
# requirements/segmentation.txt. A frozen IAT: `--cfg-options model.freeze_enhancer=True`.
custom_imports = dict(imports=['mmunorm', 'projects.low_light.low_light'], allow_failed_imports=False)
default_scope = 'mmseg'

pretrained = 'work_dirs/swin_t_un_imagenet/epoch_300.pth'

# Few night images have a rider, truck, bus or motorcycle, so IAT's authors omit these four Cityscapes classes.
classes = ('road', 'sidewalk', 'building', 'wall', 'fence', 'pole', 'traffic light', 'traffic sign', 'vegetation',
           'terrain', 'sky', 'person', 'car', 'train', 'bicycle')

# The run has 20,000 steps of 8 images, as IAT's.
crop_size = (512, 512)
model = dict(
    type='EnhancedModel',
    task_model='EncoderDecoder',
    enhancer=dict(
        type='IAT',
        norm_cfg=dict(type='UN', window=4, warmup_iters=1000),
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/iat_un_lol_v1/epoch_200.pth', prefix='backbone.')),
    data_preprocessor=dict(
        type='SegDataPreProcessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        size=crop_size),
    backbone=dict(
        type='UNSwinTransformer',
        arch='tiny',
        window_size=7,
        drop_path_rate=0.3,
        pad_small_map=True,
        out_indices=(0, 1, 2, 3),
        norm_cfg=dict(type='UN', window=4, warmup_iters=1000),
        init_cfg=dict(type='Pretrained', checkpoint=pretrained, prefix='backbone.')),
    decode_head=dict(
        type='UPerHead',
        in_channels=[96, 192, 384, 768],
        in_index=[0, 1, 2, 3],
        channels=512,
        num_classes=len(classes),
        norm_cfg=dict(type='SyncBN'),
        align_corners=False),
    auxiliary_head=dict(
        type='FCNHead',
        in_channels=384,
        in_index=2,
        channels=256,
        num_convs=1,
        concat_input=False,
        num_classes=len(classes),
        norm_cfg=dict(type='SyncBN'),
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', loss_weight=0.4)),
    test_cfg=dict(mode='whole'))

# Without PhotoMetricDistortion, whose brightness changes of up to 32 exceed the brightness of some images.
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='RandomResize', scale=(1920, 1080), ratio_range=(0.5, 2.0), keep_ratio=True),
    dict(type='RandomCrop', crop_size=crop_size, cat_max_ratio=0.75),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackSegInputs'),
]
test_pipeline = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), dict(type='PackSegInputs')]

# DarkZurichDataset is Cityscapes' classes with the names of ACDC's files.
acdc = dict(type='DarkZurichDataset', data_root='data/acdc/', metainfo=dict(classes=classes))
train_dataloader = dict(
    batch_size=8,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        data_prefix=dict(img_path='rgb_anon/night/train', seg_map_path='gt/night/train'),
        pipeline=train_pipeline,
        **acdc))
val_dataloader = dict(
    batch_size=1,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        data_prefix=dict(img_path='rgb_anon/night/val', seg_map_path='gt/night/val'),
        pipeline=test_pipeline,
        **acdc))
test_dataloader = val_dataloader
val_evaluator = dict(type='IoUMetric', iou_metrics=['mIoU'])
test_evaluator = val_evaluator

train_cfg = dict(type='IterBasedTrainLoop', max_iters=20000, val_interval=2000)
val_cfg = dict()
test_cfg = dict()
# As the stock Swin-T with UPerNet. Weight decay would pull IAT's colour matrix, which starts as the identity, to zero.
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=6e-5, betas=(0.9, 0.999), weight_decay=0.01),
    paramwise_cfg=dict(
        norm_decay_mult=0.,
        custom_keys={
            'relative_position_bias_table': dict(decay_mult=0.),
            'enhancer': dict(decay_mult=0.)
        }))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type='PolyLR', power=1.0, begin=1500, end=20000, by_epoch=False),
]

default_hooks = dict(
    logger=dict(type='LoggerHook', interval=50, log_metric_by_epoch=False),
    checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=2000, max_keep_ckpts=2))
log_processor = dict(by_epoch=False)
