# WMT17 English to German, as two plain text files for each split.
_base_ = ['../../_base_/translation.py']

data_root = 'data/translation/wmt17_en_de'
model = dict(backbone=dict(vocab_size=32000))
train_dataloader = dict(dataset=dict(data_root=data_root))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = dict(dataset=dict(data_root=data_root))
val_evaluator = dict(data_root=data_root)
test_evaluator = dict(data_root=data_root)
