# IAT on pairs of dark and light digit scenes: `python projects/low_light/tools/make_dark.py`. Each image of 128 pixels
# has one gamma, so crops of a quarter are sufficient.
_base_ = ['../_base_/enhancer.py']

# The run has about 750 steps: the paper's warm-up of 4000 would never end.
model = dict(backbone=dict(norm_cfg=dict(type='UN', window=4, warmup_iters=100)))

train_pipeline = [
    dict(type='LoadPair'),
    dict(type='RandomCropPair', crop_size=(64, 64)),
    dict(type='RandomFlipPair'),
    dict(type='PackPair'),
]
data_root = 'data/'
train_dataloader = dict(
    num_workers=1,
    dataset=dict(
        data_root=data_root,
        data_prefix=dict(img='digits_dark/train', target='digits/coco/train'),
        pipeline=train_pipeline))
val_dataloader = dict(
    dataset=dict(data_root=data_root, data_prefix=dict(img='digits_dark/val', target='digits/coco/val')))
test_dataloader = val_dataloader

train_cfg = dict(max_epochs=4, val_interval=4)
optim_wrapper = dict(optimizer=dict(lr=1e-3))
default_hooks = dict(checkpoint=dict(interval=4))
randomness = dict(seed=0)
