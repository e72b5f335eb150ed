# LOL-V2-real, 689 training and 100 test pairs; low00001.png is the image of normal00001.png.
_base_ = ['../_base_/enhancer.py']

# The run has about 17,000 steps on one GPU.
model = dict(backbone=dict(norm_cfg=dict(type='UN', window=4, warmup_iters=1000)))

data = dict(data_root='data/lol_v2/Real_captured/', rename=('^low', 'normal'))
train_dataloader = dict(dataset=dict(data_prefix=dict(img='Train/Low', target='Train/Normal'), **data))
val_dataloader = dict(dataset=dict(data_prefix=dict(img='Test/Low', target='Test/Normal'), **data))
test_dataloader = val_dataloader
