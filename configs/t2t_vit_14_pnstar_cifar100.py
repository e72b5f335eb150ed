_base_ = ['./t2t_vit_14_ln_cifar100.py']

pretrained = 'work_dirs/t2t_vit_14_pnstar_imagenet/epoch_300.pth'

model = dict(
    backbone=dict(
        norm_cfg=dict(type='PN', layer_scale=False), init_cfg=dict(checkpoint=pretrained)))
