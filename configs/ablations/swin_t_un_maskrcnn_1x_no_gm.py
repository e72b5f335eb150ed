# Table 5: each step is normalized by its own statistics.
_base_ = ['../swin_t_un_maskrcnn_1x.py']

model = dict(backbone=dict(norm_cfg=dict(forward_average='current')))
