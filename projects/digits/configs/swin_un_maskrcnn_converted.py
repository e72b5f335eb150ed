# The digits Mask R-CNN from its LayerNorm checkpoint, all norms at once, in a quarter of the steps. First:
#   python tools/train.py projects/digits/configs/swin_ln_maskrcnn.py
#   python tools/convert_norms.py projects/digits/configs/swin_ln_maskrcnn.py work_dirs/swin_ln_maskrcnn/iter_700.pth \
#       --out work_dirs/converted
_base_ = ['./swin_un_maskrcnn.py']

pretrained = None
teacher = 'work_dirs/swin_ln_maskrcnn/iter_700.pth'
load_from = 'work_dirs/converted/swin_un_maskrcnn.pth'
model = dict(backbone=dict(init_cfg=None))
custom_hooks = [dict(type='DistillationHook', checkpoint=teacher, weight=0.5)]

max_iters = 175
train_cfg = dict(max_iters=max_iters, val_interval=max_iters)
optim_wrapper = dict(clip_grad=dict(max_norm=1.0))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=20),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=False, begin=20, end=max_iters),
]
default_hooks = dict(checkpoint=dict(interval=max_iters))
