# IAT from its LOL-V1 weights before YOLOv3 from its COCO weights, trained jointly on ExDark. A frozen IAT:
# `--cfg-options model.freeze_enhancer=True`.
_base_ = ['mmdet::yolo/yolov3_d53_8xb8-ms-608-273e_coco.py', './_base_/exdark.py']
custom_imports = dict(imports=['mmunorm', 'projects.low_light.low_light'], allow_failed_imports=False)

load_from = 'https://download.openmmlab.com/mmdetection/v2.0/yolo/yolov3_d53_mstrain-608_273e_coco/' \
    'yolov3_d53_mstrain-608_273e_coco_20210518_115020-a2c3acb8.pth'

# The run has 14,400 steps of 8 images.
model = dict(
    type='EnhancedModel',
    task_model='YOLOV3',
    enhancer=dict(
        type='IAT',
        norm_cfg=dict(type='UN', window=4, warmup_iters=1000),
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/iat_un_lol_v1/epoch_200.pth', prefix='backbone.')),
    backbone=dict(init_cfg=None),
    bbox_head=dict(num_classes=12))

# Without PhotoMetricDistortion, whose brightness changes of up to 32 exceed the brightness of some images.
train_pipeline = [step for step in _base_.train_pipeline if step.type != 'PhotoMetricDistortion']
train_dataloader = dict(dataset=dict(
    _delete_=True,
    type='ConcatDataset',
    datasets=[
        dict(ann_file=f'annotations/{split}.json', filter_cfg=dict(filter_empty_gt=True, min_size=32),
             pipeline=train_pipeline, **_base_.exdark) for split in ('train', 'val')
    ]))
val_dataloader = dict(dataset=dict(ann_file=_base_.exdark_test, **_base_.exdark))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file='data/exdark/annotations/test.json')
test_evaluator = val_evaluator

train_cfg = dict(max_epochs=24, val_interval=6)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=500),
    dict(type='MultiStepLR', by_epoch=True, milestones=[16, 22], gamma=0.1),
]
# Weight decay would pull IAT's colour matrix, which starts as the identity, to zero.
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'enhancer': dict(decay_mult=0.)}))
default_hooks = dict(checkpoint=dict(interval=6, max_keep_ckpts=2))
