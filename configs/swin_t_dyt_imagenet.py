_base_ = ['./swin_t_ln_imagenet.py']

model = dict(backbone=dict(norm_cfg=dict(type='DyT')))
