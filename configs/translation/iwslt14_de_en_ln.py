# UN's paper: Transformer-small, RAdam 7e-4, warm-up 6000, 4096 tokens in a batch, dropout 0.3, 100,000 steps.
# The weight decay and the size of the vocabulary are ours.
_base_ = ['./_base_/iwslt14_de_en.py']

model = dict(backbone=dict(arch='small', dropout=0.3))
optim_wrapper = dict(
    optimizer=dict(_delete_=True, type='RAdam', lr=7e-4, betas=(0.9, 0.98), weight_decay=1e-4))
param_scheduler = [dict(type='InverseSquareRoot', warmup=6000, by_epoch=False)]
