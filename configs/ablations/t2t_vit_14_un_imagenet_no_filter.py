# Table 7: the averages stay on steps with outliers.
_base_ = ['../t2t_vit_14_un_imagenet.py']

model = dict(backbone=dict(norm_cfg=dict(outlier_filter=False)))
