# Mask R-CNN with Swin-T from mmdet's public LayerNorm checkpoint in 12 epochs: its norms fade one after the other. The
# total batch of 16 is 8 GPUs x 2 pictures, and `--auto-scale-lr` fits other batches.
_base_ = ['../swin_t_un_maskrcnn_1x.py']

pretrained = None
load_from = 'https://download.openmmlab.com/mmdetection/v2.0/swin/mask_rcnn_swin-t-p4-w7_fpn_ms-crop-3x_coco/' \
    'mask_rcnn_swin-t-p4-w7_fpn_ms-crop-3x_coco_20210906_131725-bacf6f7b.pth'
model = dict(backbone=dict(norm_cfg=dict(type='FadingUN'), init_cfg=None))
custom_hooks = [dict(type='FadingHook'), dict(type='DistillationHook', checkpoint=load_from)]

optim_wrapper = dict(optimizer=dict(lr=2e-5), clip_grad=dict(max_norm=1.0))
