# The same, one norm after the other. This needs no conversion before: the run starts from the LayerNorm checkpoint.
_base_ = ['./swin_un_classifier_converted.py']

load_from = _base_.teacher
model = dict(backbone=dict(norm_cfg=dict(type='FadingUN')))
custom_hooks = [*_base_.custom_hooks, dict(type='FadingHook')]
