_base_ = ['./debian_en_it_deep_ln.py']

# No outlier filter is what UN's authors advise for translation.
model = dict(
    backbone=dict(norm_cfg=dict(type='UN', window=4, outlier_filter=False, warmup_iters=200)))
