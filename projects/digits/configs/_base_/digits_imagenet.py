# Single handwritten digits in ImageNet folders: `python projects/digits/tools/make_digits.py`.
data_preprocessor = dict(
    num_classes=10, mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=32),  # the size of the digits; for images of other sizes
    dict(type='RandomCrop', crop_size=32, padding=3, padding_mode='edge'),
    dict(type='ColorJitter', brightness=0.3, contrast=0.3, saturation=0.3),
    dict(type='PackInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=32),
    dict(type='PackInputs'),
]

train_dataloader = dict(
    batch_size=64,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='CustomDataset', data_root='data/digits/imagenet', data_prefix='train',
        pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=64,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='CustomDataset', data_root='data/digits/imagenet', data_prefix='val',
        pipeline=test_pipeline))
test_dataloader = val_dataloader

val_evaluator = dict(type='Accuracy', topk=(1, ))
test_evaluator = val_evaluator
