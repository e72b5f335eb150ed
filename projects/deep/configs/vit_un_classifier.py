# A narrow Vision Transformer on handwritten digits of 8x8 pixels, to compare residual schemes over depths. Depth and
# scheme: `--cfg-options model.backbone.arch.num_layers=48 model.backbone.residual_cfg.type=DeepNorm`.
_base_ = [
    '../../digits/configs/_base_/handwritten_digits.py', '../../digits/configs/_base_/classifier_run.py'
]
custom_imports = dict(imports=['mmunorm', 'projects.deep.deep', 'projects.digits.digits'], allow_failed_imports=False)

# The run has about 405 steps: the paper's warm-up of 4000 would never end.
model = dict(
    type='ImageClassifier',
    init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02, bias=0.),
    backbone=dict(
        type='UNVisionTransformer',
        arch=dict(embed_dims=64, num_layers=12, num_heads=4, feedforward_channels=256),
        img_size=8,
        patch_size=2,
        in_channels=1,
        norm_cfg=dict(type='UN', window=4, warmup_iters=100),
        residual_cfg=dict(type='PreNorm')),
    head=dict(
        type='VisionTransformerClsHead',
        num_classes=10,
        in_channels=64,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        topk=(1, )))

# No warm-up and no gradient clipping, which would hide the behaviour of a scheme at the start.
optim_wrapper = dict(optimizer=dict(lr=5e-4), clip_grad=None)
param_scheduler = [dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=True, convert_to_iter_based=True)]

train_cfg = dict(max_epochs=9, val_interval=3)
default_hooks = dict(logger=dict(interval=5), checkpoint=dict(interval=3))
custom_hooks = [dict(type='LayerStatisticsHook')]  # for projects/deep/tools/depth.py
