_base_ = ['./swin_t_ln_maskrcnn_1x.py']

pretrained = 'work_dirs/swin_t_un_imagenet/epoch_300.pth'

model = dict(
    backbone=dict(
        norm_cfg=dict(type='UN', window=4), init_cfg=dict(checkpoint=pretrained)))
