# In its ImageNet weights LayerNorm has faded out. From LN's or from nothing it fades over half the run.
_base_ = ['./swin_t_ln_maskrcnn_3x.py']

pretrained = 'work_dirs/swin_t_prepbn_imagenet/epoch_300.pth'

model = dict(
    backbone=dict(
        norm_cfg=dict(type='PRepBN', steps=131940), init_cfg=dict(checkpoint=pretrained)))
