_base_ = ['./swin_t_ln_fasterrcnn_exdark.py']

load_from = 'work_dirs/swin_t_un_maskrcnn_3x/epoch_36.pth'

# The run has 3600 steps of 16 pictures.
model = dict(
    enhancer=dict(
        norm_cfg=dict(type='UN', window=4, warmup_iters=350),
        init_cfg=dict(checkpoint='work_dirs/iat_un_lol_v1/epoch_200.pth')),
    backbone=dict(norm_cfg=dict(type='UN', window=4, warmup_iters=350)))
