# Mask R-CNN, FPN, Swin-T, 36 epochs: the stock 3x recipe (AdamW 1e-4, weight decay 0.05, multi-scale
# crops) with a total batch of 16, which is 8 GPUs x 2 images; `--auto-scale-lr` fits other batches.
_base_ = ['mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_ms-crop-3x_coco.py', './_base_/mmunorm.py']

# Backbone weights to start from: those of the matching ImageNet config.
pretrained = 'work_dirs/swin_t_ln_imagenet/epoch_300.pth'

model = dict(
    backbone=dict(
        _delete_=True,
        type='UNSwinTransformer',
        arch='tiny',
        window_size=7,
        drop_path_rate=0.2,
        pad_small_map=True,
        out_indices=(0, 1, 2, 3),
        norm_cfg=dict(type='LN'),
        init_cfg=dict(type='Pretrained', checkpoint=pretrained, prefix='backbone.')))
