# Swin-T on ImageNet-1K, 300 epochs from scratch, its published recipe; the total batch of 1024 is
# 16 GPUs x 64 images, and `--auto-scale-lr` fits other batches.
_base_ = ['mmpretrain::swin_transformer/swin-tiny_16xb64_in1k.py', './_base_/mmunorm.py']

model = dict(backbone=dict(type='UNSwinTransformer', norm_cfg=dict(type='LN')))

default_hooks = dict(checkpoint=dict(max_keep_ckpts=3))
