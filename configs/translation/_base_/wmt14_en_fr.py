# WMT14 English to French, 36 million pairs, as two plain text files for each split.
_base_ = ['../../_base_/translation.py']

data_root = 'data/translation/wmt14_en_fr'
model = dict(backbone=dict(vocab_size=40000))
train_dataloader = dict(dataset=dict(data_root=data_root))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = dict(dataset=dict(data_root=data_root))
val_evaluator = dict(data_root=data_root)
test_evaluator = dict(data_root=data_root)
