_base_ = ['./_base_/wmt17_en_de_deep.py']

arch = dict(encoder_layers=50, decoder_layers=50)
model = dict(backbone=dict(arch=arch, residual_cfg=dict(type='BranchNorm', warmup_iters=4000)))
