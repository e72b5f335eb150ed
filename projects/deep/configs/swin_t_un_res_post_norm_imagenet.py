# Swin-T with the norms at the ends of the branches, as in Swin V2.
_base_ = ['../../../configs/swin_t_un_imagenet.py']

model = dict(backbone=dict(residual_cfg=dict(type='ResPostNorm')))
