# English to Italian with a small network, for a CPU: few steps, so small batches, no dropout, and a rate that falls to
# the end.
_base_ = ['./_base_/debian_en_it.py']

model = dict(
    backbone=dict(
        arch=dict(encoder_layers=3, decoder_layers=3, embed_dims=256, feedforward_channels=1024, num_heads=4),
        dropout=0.))
train_dataloader = dict(batch_sampler=dict(max_tokens=1024), dataset=dict(max_length=100))
optim_wrapper = dict(optimizer=dict(lr=1e-3, weight_decay=1e-4))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, end=200, by_epoch=False),
    dict(type='LinearLR', start_factor=1., end_factor=0.02, begin=200, end=4000, by_epoch=False)]
train_cfg = dict(max_iters=4000, val_interval=1000)
default_hooks = dict(logger=dict(interval=50), checkpoint=dict(interval=1000, max_keep_ckpts=2))
