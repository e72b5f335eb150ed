# Swin-T with the norms at the ends of the branches, as in Swin V2.
_base_ = ['../../../configs/swin_t_un_imagenet.py']
custom_imports = dict(imports=['mmunorm', 'projects.deep.deep'], allow_failed_imports=False)

model = dict(backbone=dict(type='ResidualSwinTransformer', residual_cfg=dict(type='ResPostNorm')))
