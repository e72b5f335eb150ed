_base_ = ['./swin_t_ln_res_post_norm_imagenet.py']

model = dict(backbone=dict(norm_cfg=dict(type='UN', window=4)))
