# T is the BN-paper's; the run has about 375000 updates.
_base_ = ['./deit_s48_ln_pre_norm_imagenet.py']

model = dict(backbone=dict(residual_cfg=dict(type='BranchNorm', warmup_iters=4000)))
