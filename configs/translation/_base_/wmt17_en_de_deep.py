# BranchNorm's paper: width 512, 2048 in the feed-forward networks, Adam (0.9, 0.98), 100,000 steps, the inverse square
# root. All else is ours: a rate between the 5e-4 and 1.5e-3 of its Figure 7, and 8 GPUs with 4096 tokens each.
_base_ = ['./wmt17_en_de.py']

model = dict(
    backbone=dict(
        arch=dict(encoder_layers=6, decoder_layers=6, embed_dims=512, feedforward_channels=2048, num_heads=8),
        dropout=0.1))
optim_wrapper = dict(optimizer=dict(lr=1e-3))
