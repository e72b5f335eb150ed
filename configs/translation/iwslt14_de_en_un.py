_base_ = ['./iwslt14_de_en_ln.py']

model = dict(backbone=dict(norm_cfg=dict(type='UN', window=4, outlier_filter=False)))
