_base_ = ['./swin_t_ln_maskrcnn_3x.py']

pretrained = 'work_dirs/swin_t_rmsn_imagenet/epoch_300.pth'

model = dict(
    backbone=dict(
        norm_cfg=dict(type='RMSN'), init_cfg=dict(checkpoint=pretrained)))
