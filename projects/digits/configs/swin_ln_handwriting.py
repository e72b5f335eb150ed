# A smaller Swin on handwritten digits of 8x8 pixels, which trains in less than a minute and needs no data on disk.
_base_ = ['./_base_/handwritten_digits.py', './_base_/classifier_run.py']

model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='UNSwinTransformer',
        arch=dict(embed_dims=48, depths=[2, 2], num_heads=[2, 4]),
        img_size=8,
        patch_size=1,
        in_channels=1,
        window_size=4,
        out_indices=(1, ),
        drop_path_rate=0.05,
        norm_cfg=dict(type='LN'),
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.08, bias=0.)),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=96,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        topk=(1, )))

optim_wrapper = dict(optimizer=dict(lr=2e-3))
train_cfg = dict(max_epochs=6, val_interval=6)
default_hooks = dict(logger=dict(interval=5), checkpoint=dict(interval=6))
