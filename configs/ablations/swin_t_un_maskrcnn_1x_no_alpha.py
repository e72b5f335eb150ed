# Table 5: no momentum in the backward pass.
_base_ = ['../swin_t_un_maskrcnn_1x.py']

model = dict(backbone=dict(norm_cfg=dict(backward_momentum=False)))
