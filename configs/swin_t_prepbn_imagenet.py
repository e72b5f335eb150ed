# LayerNorm fades out over the first half of the run.
_base_ = ['./swin_t_ln_imagenet.py']

model = dict(backbone=dict(norm_cfg=dict(type='PRepBN', steps=187800)))
