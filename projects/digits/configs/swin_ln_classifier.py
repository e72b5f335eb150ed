# A small Swin on 32x32 handwritten digits; the detectors of this folder start from its backbone.
_base_ = ['./_base_/classifier.py']

model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='UNSwinTransformer',
        arch=dict(embed_dims=48, depths=[2, 2, 2, 2], num_heads=[2, 4, 8, 16]),
        img_size=32,
        patch_size=4,
        window_size=4,
        drop_path_rate=0.05,
        pad_small_map=True,
        norm_cfg=dict(type='LN'),
        # With the default 0.02, such narrow layers learn slowly with any norm: docs/results/accuracy.md.
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.08, bias=0.)),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=384,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        topk=(1, )))
