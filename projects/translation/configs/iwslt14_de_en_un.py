# IWSLT14 German to English, 0.18 million pairs, as two plain text files for each split.
_base_ = ['./_base_/translation.py']

data_root = 'data/translation/iwslt14_de_en'
# UN's paper: Transformer-small. Its authors' script run_iwslt14_train_un.sh: the rate 7e-4, warm-up 6000, 100,000
# steps, 4096 tokens in a batch, dropout 0.3, weight decay 1e-4; there Adam. RAdam and the vocabulary's size are ours.
model = dict(
    backbone=dict(
        vocab_size=10000,
        arch='small',
        dropout=0.3,
        norm_cfg=dict(type='UN', window=4, outlier_filter=False)))
train_dataloader = dict(dataset=dict(data_root=data_root))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = dict(dataset=dict(data_root=data_root))
val_evaluator = dict(data_root=data_root)
test_evaluator = dict(data_root=data_root)

optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='RAdam', lr=7e-4, betas=(0.9, 0.98), weight_decay=1e-4))
param_scheduler = [dict(type='InverseSquareRoot', warmup=6000, by_epoch=False)]
