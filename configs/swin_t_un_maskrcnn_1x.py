# The 3x recipe with 12 epochs, for the ablations.
_base_ = ['./swin_t_un_maskrcnn_3x.py']

train_cfg = dict(max_epochs=12)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=1000),
    dict(type='MultiStepLR', begin=0, end=12, by_epoch=True, milestones=[8, 11], gamma=0.1),
]
