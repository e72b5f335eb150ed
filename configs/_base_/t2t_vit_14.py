# T2T-ViT-14 with the Performer in its tokens-to-token module, as in the paper.
_base_ = ['mmpretrain::_base_/models/t2t-vit-t-14.py']

model = dict(
    backbone=dict(
        type='UNT2TViT',
        t2t_cfg=dict(token_dims=64, use_performer=True),
        norm_cfg=dict(type='LN')))
