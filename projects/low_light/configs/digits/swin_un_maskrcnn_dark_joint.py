# The IAT before the detector is trained jointly by its loss.
_base_ = ['./swin_un_maskrcnn_dark_frozen.py']

model = dict(freeze_enhancer=False)
# The detector's weight decay would pull IAT's colour matrix, which starts as the identity, to zero.
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'enhancer': dict(decay_mult=0.)}))
