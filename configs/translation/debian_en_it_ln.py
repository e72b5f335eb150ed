# English to Italian with a small network, for a CPU.
_base_ = ['./_base_/debian_en_it.py']

model = dict(
    backbone=dict(
        arch=dict(encoder_layers=3, decoder_layers=3, embed_dims=256, feedforward_channels=1024, num_heads=4),
        dropout=0.1))
train_dataloader = dict(batch_sampler=dict(max_tokens=2048), dataset=dict(max_length=100))
optim_wrapper = dict(optimizer=dict(lr=2e-3, weight_decay=1e-4))
param_scheduler = [dict(type='InverseSquareRoot', warmup=300, by_epoch=False)]
train_cfg = dict(max_iters=1200, val_interval=600)
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=600, max_keep_ckpts=2))
