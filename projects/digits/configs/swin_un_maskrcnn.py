# The Faster R-CNN of this folder with a mask head.
_base_ = ['./swin_un_fasterrcnn.py']

model = dict(
    type='MaskRCNN',
    data_preprocessor=dict(pad_mask=True),
    roi_head=dict(
        mask_roi_extractor=dict(
            type='SingleRoIExtractor',
            roi_layer=dict(type='RoIAlign', output_size=14, sampling_ratio=2),
            out_channels=_base_.channels,
            featmap_strides=_base_.featmap_strides,
            finest_scale=28),
        mask_head=dict(
            type='FCNMaskHead',
            num_convs=3,
            in_channels=_base_.channels,
            conv_out_channels=_base_.channels,
            num_classes=10,
            loss_mask=dict(type='CrossEntropyLoss', use_mask=True, loss_weight=1.0))),
    train_cfg=dict(rcnn=dict(mask_size=28)),
    test_cfg=dict(rcnn=dict(mask_thr_binary=0.5)))

val_evaluator = dict(metric=['bbox', 'segm'])
test_evaluator = val_evaluator
