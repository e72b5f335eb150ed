# IWSLT14 German to English, 0.18 million pairs, as two plain text files for each split.
_base_ = ['../../_base_/translation.py']

data_root = 'data/translation/iwslt14_de_en'
model = dict(backbone=dict(vocab_size=10000))
train_dataloader = dict(dataset=dict(data_root=data_root))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = dict(dataset=dict(data_root=data_root))
val_evaluator = dict(data_root=data_root)
test_evaluator = dict(data_root=data_root)
