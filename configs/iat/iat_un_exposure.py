_base_ = ['./iat_ln_exposure.py']

# The run has about 88,000 steps on one GPU.
model = dict(backbone=dict(norm_cfg=dict(type='UN', window=4, warmup_iters=4000)))
