# WMT17 English to German, as two plain text files for each split.
_base_ = ['./_base_/translation.py']

data_root = 'data/translation/wmt17_en_de'
# BranchNorm's paper: width 512, 2048 in the feed-forward networks, Adam (0.9, 0.98), 100,000 steps, the inverse square
# root, a test with beam 4 and a length penalty of 0.6. Its batch is 32 GPUs with 16,384 tokens each; on 8 GPUs:
#   --cfg-options train_dataloader.batch_sampler.max_tokens=16384 optim_wrapper.accumulative_counts=4
# The rest is ours: a rate between the 5e-4 and 1.5e-3 that it compares, dropout, and 4096 tokens per GPU.
# Its depths are 6, 18, 50, 100 and 250, each with DeepNorm and with BranchNorm:
#   --cfg-options model.backbone.arch.encoder_layers=100 model.backbone.arch.decoder_layers=100 \
#       model.backbone.residual_cfg.type=BranchNorm model.backbone.residual_cfg.warmup_iters=4000
model = dict(
    length_penalty=0.6,
    backbone=dict(
        vocab_size=32000,
        arch=dict(encoder_layers=18, decoder_layers=18, embed_dims=512, feedforward_channels=2048, num_heads=8),
        dropout=0.1,
        residual_cfg=dict(type='DeepNorm')))
train_dataloader = dict(dataset=dict(data_root=data_root))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = dict(dataset=dict(data_root=data_root))
val_evaluator = dict(data_root=data_root)
test_evaluator = dict(data_root=data_root)

optim_wrapper = dict(optimizer=dict(lr=1e-3))
