# The Mask R-CNN of this folder on dark scenes: `python projects/low_light/tools/make_dark.py`.
_base_ = ['../../../digits/configs/swin_un_maskrcnn.py']

# Without PhotoMetricDistortion, whose brightness changes of up to 32 exceed the brightness of these images.
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomResize', scale=_base_.scale, ratio_range=(0.8, 1.25), keep_ratio=True),
    dict(type='RandomCrop', crop_size=_base_.scale),
    dict(type='Pad', size=_base_.scale),
    dict(type='PackDetInputs'),
]
data_root = 'data/digits_dark/'
train_dataloader = dict(dataset=dict(data_root=data_root, pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val.json')
test_evaluator = val_evaluator
