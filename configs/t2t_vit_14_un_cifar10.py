# T2T-ViT-14 on CIFAR-10 from its ImageNet weights. The paper reports the mean of 5 runs: repeat with
# `--cfg-options randomness.seed=0` to 4, each with its own `--work-dir`.
_base_ = [
    './_base_/t2t_vit_14.py', './_base_/cifar10_224.py', './_base_/cifar_60e.py',
    './_base_/mmunorm.py'
]

# Pretrained backbone weights: those of the matching ImageNet config.
pretrained = 'work_dirs/t2t_vit_14_un_imagenet/epoch_300.pth'

model = dict(
    backbone=dict(
        norm_cfg=dict(type='UN', window=4),
        init_cfg=dict(
            _delete_=True, type='Pretrained', checkpoint=pretrained, prefix='backbone.')),
    head=dict(num_classes=10, loss=dict(_delete_=True, type='CrossEntropyLoss')),
    train_cfg=None)
