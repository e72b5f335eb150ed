_base_ = ['./iat_ln_lol_v2.py']

# The run has about 17,000 steps on one GPU.
model = dict(backbone=dict(norm_cfg=dict(type='UN', window=4, warmup_iters=1000)))
