_base_ = ['./swin_un_maskrcnn.py']

pretrained = 'work_dirs/swin_ln_classifier/epoch_8.pth'

model = dict(
    backbone=dict(norm_cfg=dict(_delete_=True, type='LN'), init_cfg=dict(checkpoint=pretrained)))
