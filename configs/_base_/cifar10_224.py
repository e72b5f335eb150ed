# CIFAR-10, the Python version, in data/cifar10/cifar-10-batches-py. Images are enlarged to 224.
_base_ = ['mmpretrain::_base_/datasets/cifar10_bs16.py']

train_pipeline = [
    dict(type='Resize', scale=224),
    dict(type='RandomCrop', crop_size=224, padding=28),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs'),
]
test_pipeline = [
    dict(type='Resize', scale=224),
    dict(type='PackInputs'),
]

# `download=False`: a run never downloads data implicitly.
train_dataloader = dict(
    batch_size=128, num_workers=4, dataset=dict(pipeline=train_pipeline, download=False))
val_dataloader = dict(
    batch_size=128, num_workers=4, dataset=dict(pipeline=test_pipeline, download=False))
test_dataloader = val_dataloader
