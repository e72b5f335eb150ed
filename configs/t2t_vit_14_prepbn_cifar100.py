# In its ImageNet weights LayerNorm has faded out. From LN's or from nothing it fades over half the run.
_base_ = ['./t2t_vit_14_ln_cifar100.py']

pretrained = 'work_dirs/t2t_vit_14_prepbn_imagenet/epoch_300.pth'

model = dict(
    backbone=dict(
        norm_cfg=dict(type='PRepBN', steps=11730), init_cfg=dict(checkpoint=pretrained)))
