# Table 10; the base has 0.9.
_base_ = ['../swin_t_un_maskrcnn_1x.py']

model = dict(backbone=dict(norm_cfg=dict(alpha=0.6)))
