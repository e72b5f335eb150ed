# Debian's package descriptions, as `python tools/dataset/make_translation.py --pair en-it` writes them.
_base_ = ['../../_base_/translation.py']

data_root = 'data/translation/en-it'
model = dict(backbone=dict(vocab_size=4000))
train_dataloader = dict(dataset=dict(data_root=data_root))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = dict(dataset=dict(data_root=data_root))
val_evaluator = dict(data_root=data_root)
test_evaluator = dict(data_root=data_root)
