# Faster R-CNN with the recipe of swin_t_un_maskrcnn_3x.py, without masks.
_base_ = ['./swin_t_un_maskrcnn_3x.py']

model = dict(
    type='FasterRCNN',
    data_preprocessor=dict(pad_mask=False),
    roi_head=dict(mask_roi_extractor=None, mask_head=None),
    train_cfg=dict(rcnn=dict(assigner=dict(match_low_quality=False))))

train_pipeline = _base_.train_pipeline
train_pipeline[1] = dict(type='LoadAnnotations', with_bbox=True)
test_pipeline = _base_.test_pipeline
test_pipeline[2] = dict(type='LoadAnnotations', with_bbox=True)

train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(metric='bbox')
test_evaluator = val_evaluator
