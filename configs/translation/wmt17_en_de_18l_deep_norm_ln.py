_base_ = ['./_base_/wmt17_en_de_deep.py']

model = dict(
    backbone=dict(arch=dict(encoder_layers=18, decoder_layers=18), residual_cfg=dict(type='DeepNorm')))
