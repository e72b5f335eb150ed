_base_ = ['./t2t_vit_14_ln_cifar100.py']

pretrained = 'work_dirs/t2t_vit_14_dyt_imagenet/epoch_300.pth'

model = dict(
    backbone=dict(
        norm_cfg=dict(type='DyT'), init_cfg=dict(checkpoint=pretrained)))
