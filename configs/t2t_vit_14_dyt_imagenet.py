_base_ = ['./t2t_vit_14_ln_imagenet.py']

model = dict(backbone=dict(norm_cfg=dict(type='DyT')))
