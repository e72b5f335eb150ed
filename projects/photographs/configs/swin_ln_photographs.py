# The digits' Swin on cut-out objects on photographs of 32x32: `python projects/photographs/tools/make_photographs.py`.
_base_ = ['../../digits/configs/swin_ln_classifier.py']

model = dict(head=dict(num_classes=7))
data_preprocessor = dict(num_classes=7)

data_root = 'data/photographs/imagenet'
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=32),
    dict(type='RandomCrop', crop_size=32, padding=3, padding_mode='edge'),
    dict(type='RandomFlip', prob=0.5),
    dict(type='ColorJitter', brightness=0.3, contrast=0.3, saturation=0.3),
    dict(type='PackInputs'),
]
train_dataloader = dict(dataset=dict(data_root=data_root, pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = dict(dataset=dict(data_root=data_root, data_prefix='test'))
