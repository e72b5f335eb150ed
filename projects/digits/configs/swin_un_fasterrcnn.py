# Faster R-CNN with FPN and a small Swin on scenes of handwritten digits, about 6 minutes on 2 CPU cores.
# The digits are 20 to 56 pixels tall and the heads narrow, so that a laptop can train it.
_base_ = [
    'mmdet::_base_/models/faster-rcnn_r50_fpn.py', 'mmdet::_base_/default_runtime.py',
    './_base_/digits_coco.py', './_base_/digits.py'
]

# Pretrained backbone weights: those of the matching classifier.
pretrained = 'work_dirs/swin_un_classifier/epoch_8.pth'
channels = 64
featmap_strides = [4, 8, 16, 32]

# The run has 700 steps: the paper's warm-up of 4000 would never end.
model = dict(
    data_preprocessor=dict(pad_size_divisor=32),
    backbone=dict(
        _delete_=True,
        type='UNSwinTransformer',
        arch=dict(embed_dims=48, depths=[2, 2, 2, 2], num_heads=[2, 4, 8, 16]),
        img_size=128,
        patch_size=4,
        window_size=4,
        drop_path_rate=0.05,
        pad_small_map=True,
        out_indices=(0, 1, 2, 3),
        norm_cfg=dict(type='UN', window=4, warmup_iters=100),
        init_cfg=dict(type='Pretrained', checkpoint=pretrained, prefix='backbone.')),
    neck=dict(in_channels=[48, 96, 192, 384], out_channels=channels),
    rpn_head=dict(
        in_channels=channels,
        feat_channels=channels,
        anchor_generator=dict(
            scales=[4, 5.6], ratios=[1.0, 1.6, 2.5], strides=[4, 8, 16, 32, 64])),
    roi_head=dict(
        bbox_roi_extractor=dict(
            roi_layer=dict(sampling_ratio=2),
            out_channels=channels,
            featmap_strides=featmap_strides,
            finest_scale=28),
        bbox_head=dict(in_channels=channels, fc_out_channels=256, num_classes=10)),
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=500, max_per_img=200),
        rcnn=dict(sampler=dict(num=64))),
    test_cfg=dict(rpn=dict(nms_pre=500, max_per_img=200)))

max_iters = 700
train_cfg = dict(type='IterBasedTrainLoop', max_iters=max_iters, val_interval=max_iters)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')

optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=5e-4, weight_decay=0.05),
    clip_grad=dict(max_norm=10.0),
    paramwise_cfg=dict(norm_decay_mult=0., bias_decay_mult=0., flat_decay_mult=0.))

param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=50),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=False, begin=50, end=max_iters),
]

default_hooks = dict(
    logger=dict(interval=25),
    checkpoint=dict(by_epoch=False, interval=max_iters // 2, max_keep_ckpts=2))
log_processor = dict(by_epoch=False, window_size=25)
randomness = dict(seed=0)
