# LOL-V1, 485 training and 15 test pairs of 400 x 600 pixels.
_base_ = ['../_base_/enhancer.py']

# The run has about 12,000 steps on one GPU.
model = dict(backbone=dict(norm_cfg=dict(type='UN', window=4, warmup_iters=1000)))

data_root = 'data/lol_v1/'
train_dataloader = dict(
    dataset=dict(data_root=data_root, data_prefix=dict(img='our485/low', target='our485/high')))
val_dataloader = dict(dataset=dict(data_root=data_root, data_prefix=dict(img='eval15/low', target='eval15/high')))
test_dataloader = val_dataloader
