# Narrow and deep, for residual schemes and the first steps of projects/deep/tools/depth.py.
_base_ = ['./debian_en_it_un.py']
custom_imports = dict(
    imports=['mmunorm', 'projects.translation.translation', 'projects.deep.deep'], allow_failed_imports=False)

# With the outlier filter, which deep networks need: projects/translation/RESULTS.md.
model = dict(
    beam=1,
    backbone=dict(
        arch=dict(encoder_layers=6, decoder_layers=6, embed_dims=128, feedforward_channels=512, num_heads=2),
        residual_cfg=dict(type='PreNorm'),
        norm_cfg=dict(outlier_filter=True)))
train_dataloader = dict(batch_sampler=dict(max_tokens=512))
custom_hooks = [dict(type='LayerStatisticsHook')]
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, end=200, by_epoch=False),
    dict(type='LinearLR', start_factor=1., end_factor=0.02, begin=200, end=500, by_epoch=False)]
train_cfg = dict(max_iters=500, val_interval=500)
default_hooks = dict(logger=dict(interval=5))
