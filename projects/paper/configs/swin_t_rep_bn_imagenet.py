_base_ = ['../../../configs/swin_t_ln_imagenet.py']
custom_imports = dict(imports=['mmunorm', 'projects.paper.paper'], allow_failed_imports=False)

model = dict(backbone=dict(norm_cfg=dict(type='RepBN')))
