# The digits classifier from its LayerNorm checkpoint, all norms at once, in a quarter of the steps. First:
#   python tools/train.py projects/digits/configs/swin_ln_classifier.py
#   python tools/convert_norms.py projects/digits/configs/swin_ln_classifier.py \
#       work_dirs/swin_ln_classifier/epoch_8.pth --out work_dirs/converted
_base_ = ['./swin_un_classifier.py']

teacher = 'work_dirs/swin_ln_classifier/epoch_8.pth'
load_from = 'work_dirs/converted/swin_un_classifier.pth'
custom_hooks = [dict(type='DistillationHook', checkpoint=teacher, temperature=2.0, weight=0.5)]

optim_wrapper = dict(optimizer=dict(lr=3e-4), clip_grad=dict(max_norm=1.0))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=20),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=False, begin=20, end=188),
]
train_cfg = dict(max_epochs=2, val_interval=1)
