# English to German, French and Italian with one network, like OPUS-100 and MultiUN in BranchNorm's paper. A language
# token before the source selects the language. Text:
# `python projects/translation/tools/make_translation.py --pair en-de en-fr en-it`.
_base_ = ['./debian_en_it_deep_un.py']

data_root = 'data/translation/en-de-fr-it'
train_dataloader = dict(batch_sampler=dict(max_tokens=1024), dataset=dict(data_root=data_root))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = dict(dataset=dict(data_root=data_root))
val_evaluator = dict(data_root=data_root)
test_evaluator = dict(data_root=data_root)

param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, end=200, by_epoch=False),
    dict(type='LinearLR', start_factor=1., end_factor=0.02, begin=200, end=1000, by_epoch=False)]
train_cfg = dict(max_iters=1000, val_interval=1000)
