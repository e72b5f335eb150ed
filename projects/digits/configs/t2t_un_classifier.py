# A small T2T-ViT (Performer tokens-to-token module) on 32x32 handwritten digits, resized to 64x64.
_base_ = ['./_base_/classifier.py']

# The run has about 750 steps: the paper's warm-up of 4000 would never end.
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='UNT2TViT',
        img_size=64,
        embed_dims=128,
        num_layers=6,
        drop_path_rate=0.05,
        t2t_cfg=dict(use_performer=True, token_dims=32, performer_drop_rate=0.),
        layer_cfgs=dict(num_heads=4, feedforward_channels=3 * 128),
        norm_cfg=dict(type='UN', window=4, warmup_iters=100),
        # With the default 0.02, the signal vanishes in such narrow layers, and the model learns nothing in 8 epochs.
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.08)),
    head=dict(
        type='VisionTransformerClsHead',
        num_classes=10,
        in_channels=128,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        topk=(1, )))

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomCrop', crop_size=32, padding=3, padding_mode='edge'),
    dict(type='ColorJitter', brightness=0.3, contrast=0.3, saturation=0.3),
    dict(type='Resize', scale=64),
    dict(type='PackInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=64),
    dict(type='PackInputs'),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
