_base_ = ['./t2t_vit_14_ln_cifar10.py']

pretrained = 'work_dirs/t2t_vit_14_bn_imagenet/epoch_300.pth'

model = dict(
    backbone=dict(
        norm_cfg=dict(type='TokenBN'), init_cfg=dict(checkpoint=pretrained)))
