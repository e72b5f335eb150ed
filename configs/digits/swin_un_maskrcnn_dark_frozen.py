_base_ = ['./swin_ln_maskrcnn_dark_frozen.py']

pretrained = 'work_dirs/swin_un_classifier/epoch_8.pth'

# The run has 700 steps: the paper's warm-up of 4000 would never end.
model = dict(
    enhancer=dict(
        norm_cfg=dict(type='UN', window=4, warmup_iters=100),
        init_cfg=dict(checkpoint='work_dirs/iat_un_enhancer/epoch_4.pth')),
    backbone=dict(
        norm_cfg=dict(type='UN', window=4, warmup_iters=100), init_cfg=dict(checkpoint=pretrained)))
