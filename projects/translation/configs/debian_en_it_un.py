# English to Italian, Debian's package descriptions, as
# written by `python projects/translation/tools/make_translation.py --pair en-it`. The network is small, for a CPU, with
# few steps, hence small batches, no dropout, and a rate that decays to the end.
_base_ = ['./_base_/translation.py']

data_root = 'data/translation/en-it'
# Without the outlier filter, as a comment in UN's authors' code suggests for language.
model = dict(
    backbone=dict(
        vocab_size=4000,
        arch=dict(encoder_layers=3, decoder_layers=3, embed_dims=256, feedforward_channels=1024, num_heads=4),
        dropout=0.,
        norm_cfg=dict(type='UN', window=4, outlier_filter=False, warmup_iters=200)))
train_dataloader = dict(
    batch_sampler=dict(max_tokens=1024), dataset=dict(data_root=data_root, max_length=100))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = dict(dataset=dict(data_root=data_root))
val_evaluator = dict(data_root=data_root)
test_evaluator = dict(data_root=data_root)

optim_wrapper = dict(optimizer=dict(lr=1e-3, weight_decay=1e-4))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, end=200, by_epoch=False),
    dict(type='LinearLR', start_factor=1., end_factor=0.02, begin=200, end=4000, by_epoch=False)]
train_cfg = dict(max_iters=4000, val_interval=1000)
default_hooks = dict(logger=dict(interval=50), checkpoint=dict(interval=1000, max_keep_ckpts=2))
