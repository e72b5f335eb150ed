_base_ = ['./swin_ln_handwriting.py']

# The run has 270 steps: the paper's warm-up of 4000 would never end.
model = dict(backbone=dict(norm_cfg=dict(type='UN', window=4, warmup_iters=27)))
