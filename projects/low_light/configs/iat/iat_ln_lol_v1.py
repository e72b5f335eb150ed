# With LayerNorm, as in the paper and in the weights that its authors released.
_base_ = './iat_un_lol_v1.py'

model = dict(backbone=dict(norm_cfg=dict(_delete_=True, type='LN')))
