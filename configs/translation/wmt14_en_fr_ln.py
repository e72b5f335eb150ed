# UN's paper: Transformer-base. Its scores are of the mean of the last 5 checkpoints, which the run keeps. All else is
# ours: 8 GPUs with 4096 tokens each.
_base_ = ['./_base_/wmt14_en_fr.py']

model = dict(backbone=dict(arch='base', dropout=0.1))
