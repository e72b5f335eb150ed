# Mask R-CNN with Swin-T from mmdet's public LayerNorm checkpoint, in 12 epochs. First, with `teacher` below downloaded:
#   python tools/convert_norms.py configs/swin_t_ln_maskrcnn_3x.py TEACHER --out work_dirs/converted
# The total batch of 16 is 8 GPUs x 2 images; `--auto-scale-lr` fits other batches.
_base_ = ['../swin_t_un_maskrcnn_1x.py']

pretrained = None
teacher = 'https://download.openmmlab.com/mmdetection/v2.0/swin/mask_rcnn_swin-t-p4-w7_fpn_ms-crop-3x_coco/' \
    'mask_rcnn_swin-t-p4-w7_fpn_ms-crop-3x_coco_20210906_131725-bacf6f7b.pth'
load_from = 'work_dirs/converted/swin_t_un_maskrcnn_3x.pth'
model = dict(backbone=dict(init_cfg=None))
custom_hooks = [dict(type='DistillationHook', checkpoint=teacher)]

optim_wrapper = dict(optimizer=dict(lr=2e-5), clip_grad=dict(max_norm=1.0))
