_base_ = ['./debian_en_it_deep_ln.py']

# With the outlier filter, which deep networks need: docs/translation_results.md.
model = dict(
    backbone=dict(norm_cfg=dict(type='UN', window=4, warmup_iters=200)))
