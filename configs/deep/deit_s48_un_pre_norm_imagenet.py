_base_ = ['./deit_s48_ln_pre_norm_imagenet.py']

model = dict(backbone=dict(norm_cfg=dict(_delete_=True, type='UN', window=4)))
