_base_ = ['./deit_s12_ln_pre_norm_imagenet.py']

model = dict(backbone=dict(arch=dict(num_layers=48)))
