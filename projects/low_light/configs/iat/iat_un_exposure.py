# Exposure correction: five exposures of each scene, with one target, the image of expert C where it is tested.
_base_ = ['../_base_/enhancer.py']

# The run has about 88,000 steps on one GPU.
model = dict(
    backbone=dict(
        learn_gamma_base=False, norm_cfg=dict(type='UN', window=4, warmup_iters=4000)))
data = dict(data_root='data/exposure/', rename=(r'_(0|N1|N1\.5|P1|P1\.5)$', ''))
train_dataloader = dict(
    dataset=dict(data_prefix=dict(img='training/INPUT_IMAGES', target='training/GT_IMAGES'), **data))
val_dataloader = dict(
    dataset=dict(data_prefix=dict(img='testing/INPUT_IMAGES', target='testing/expert_c_testing_set'), **data))
test_dataloader = val_dataloader

train_cfg = dict(max_epochs=40, val_interval=5)
default_hooks = dict(checkpoint=dict(interval=5))
