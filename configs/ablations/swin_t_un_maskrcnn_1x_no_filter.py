# Table 7: the averages stay on steps with outliers.
_base_ = ['../swin_t_un_maskrcnn_1x.py']

model = dict(backbone=dict(norm_cfg=dict(outlier_filter=False)))
