_base_ = ['./yolov3_iat_ln_exdark.py']

# The run has 14,400 steps of 8 pictures.
model = dict(
    enhancer=dict(
        norm_cfg=dict(type='UN', window=4, warmup_iters=1000),
        init_cfg=dict(checkpoint='work_dirs/iat_un_lol_v1/epoch_200.pth')))
