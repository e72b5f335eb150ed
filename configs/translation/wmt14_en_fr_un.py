_base_ = ['./wmt14_en_fr_ln.py']

model = dict(backbone=dict(norm_cfg=dict(type='UN', window=4, outlier_filter=False)))
