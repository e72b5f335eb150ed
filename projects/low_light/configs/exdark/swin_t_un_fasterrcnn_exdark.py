# IAT from its LOL-V1 weights before the Swin-T Mask R-CNN of this package, trained jointly on ExDark. ExDark has
# no masks, so the Mask R-CNN is reduced to its Faster R-CNN. A frozen IAT: `--cfg-options
# model.freeze_enhancer=True`.
_base_ = ['../../../../configs/swin_t_un_fasterrcnn_1x.py', './_base_/exdark.py']
custom_imports = dict(imports=['mmunorm', 'projects.low_light.low_light'], allow_failed_imports=False)

pretrained = None
load_from = 'work_dirs/swin_t_un_maskrcnn_3x/epoch_36.pth'

# The run has 3600 steps of 16 images.
model = dict(
    type='EnhancedModel',
    task_model='FasterRCNN',
    enhancer=dict(
        type='IAT',
        norm_cfg=dict(type='UN', window=4, warmup_iters=350),
        init_cfg=dict(type='Pretrained', checkpoint='work_dirs/iat_un_lol_v1/epoch_200.pth', prefix='backbone.')),
    backbone=dict(init_cfg=None, norm_cfg=dict(warmup_iters=350)),
    roi_head=dict(bbox_head=dict(num_classes=12)))

train_dataloader = dict(dataset=dict(
    _delete_=True,
    type='ConcatDataset',
    datasets=[
        dict(ann_file=f'annotations/{split}.json', filter_cfg=dict(filter_empty_gt=True, min_size=32),
             pipeline=_base_.train_pipeline, **_base_.exdark) for split in ('train', 'val')
    ]))
val_dataloader = dict(dataset=dict(ann_file=_base_.exdark_test, **_base_.exdark))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file='data/exdark/annotations/test.json')
test_evaluator = val_evaluator

# Weight decay would pull IAT's colour matrix, which starts as the identity, to zero.
optim_wrapper = dict(paramwise_cfg=dict(custom_keys={'enhancer': dict(decay_mult=0.)}))
