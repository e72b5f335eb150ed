# Table 5: no mean over the window in the backward pass.
_base_ = ['../swin_t_un_maskrcnn_1x.py']

model = dict(backbone=dict(norm_cfg=dict(backward_average='current')))
