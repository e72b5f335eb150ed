# A trained, frozen IAT before the Mask R-CNN on dark scenes.
_base_ = ['./swin_un_maskrcnn_dark.py']
custom_imports = dict(imports=['mmunorm', 'projects.low_light.low_light'], allow_failed_imports=False)

model = dict(
    type='EnhancedModel',
    task_model='MaskRCNN',
    enhancer=dict(
        type='IAT',
        norm_cfg=dict(type='UN', window=4, warmup_iters=100),
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/iat_un_enhancer/epoch_4.pth', prefix='backbone.')),
    freeze_enhancer=True)
