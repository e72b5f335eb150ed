# WMT14 English to French, 36 million pairs, as two plain text files for each split.
_base_ = ['./_base_/translation.py']

data_root = 'data/translation/wmt14_en_fr'
# UN's paper: Transformer-base. Its scores are of the average of the last 5 checkpoints, which the run keeps. The rest
# is ours: 8 GPUs with 4096 tokens each.
model = dict(
    backbone=dict(
        vocab_size=40000, arch='base', dropout=0.1, norm_cfg=dict(type='UN', window=4, outlier_filter=False)))
train_dataloader = dict(dataset=dict(data_root=data_root))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = dict(dataset=dict(data_root=data_root))
val_evaluator = dict(data_root=data_root)
test_evaluator = dict(data_root=data_root)
