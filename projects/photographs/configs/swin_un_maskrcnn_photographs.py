# The digits' Mask R-CNN on scenes of cut-out objects on photographs, from the backbone of this folder's classifier.
_base_ = ['../../digits/configs/swin_un_maskrcnn.py']

pretrained = 'work_dirs/swin_un_photographs/epoch_8.pth'
model = dict(
    backbone=dict(init_cfg=dict(checkpoint=pretrained)),
    # Unlike digits, objects may be wide or tall.
    rpn_head=dict(anchor_generator=dict(ratios=[0.5, 1.0, 2.0])),
    roi_head=dict(bbox_head=dict(num_classes=7), mask_head=dict(num_classes=7)))

data_root = 'data/photographs/coco/'
metainfo = dict(classes=('animal', 'flower', 'food', 'instrument', 'planet', 'sign', 'tool'))
scale = (128, 128)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomResize', scale=scale, ratio_range=(0.8, 1.25), keep_ratio=True),
    dict(type='RandomCrop', crop_size=scale),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PhotoMetricDistortion'),
    dict(type='Pad', size=scale),
    dict(type='PackDetInputs'),
]
train_dataloader = dict(dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(data_root=data_root, metainfo=metainfo))
test_dataloader = dict(
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/instances_test.json',
        data_prefix=dict(img='test/')))
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val.json')
test_evaluator = dict(ann_file=data_root + 'annotations/instances_test.json')

# Val and test have other objects than train, hence four times the steps of the digits: 15 minutes on one core.
max_iters = 2800
train_cfg = dict(max_iters=max_iters, val_interval=max_iters // 4)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=50),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=False, begin=50, end=max_iters),
]
