_base_ = ['./vit_ln_classifier.py']

# The run has 405 steps: the paper's warm-up of 4000 would never end.
model = dict(backbone=dict(norm_cfg=dict(_delete_=True, type='UN', window=4, warmup_iters=100)))
