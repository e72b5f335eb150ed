_base_ = ['./swin_un_maskrcnn_dark_frozen.py']

model = dict(freeze_enhancer=False)
# As in swin_ln_maskrcnn_dark_joint.py.
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'enhancer': dict(decay_mult=0.)}))
