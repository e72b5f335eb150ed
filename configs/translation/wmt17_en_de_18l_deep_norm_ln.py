_base_ = ['./_base_/wmt17_en_de_deep.py']

arch = dict(encoder_layers=18, decoder_layers=18)
model = dict(backbone=dict(arch=arch, residual_cfg=dict(type='DeepNorm')))
