# Translation in mmengine's Runner (arXiv 1706.03762): Adam, an inverse square root
# schedule with warm-up, and batches by number of tokens. A recipe sets the folder of its texts, its network and steps.
custom_imports = dict(imports=['mmunorm', 'projects.translation.translation'], allow_failed_imports=False)
default_scope = 'mmengine'

model = dict(
    type='TranslationModel',
    label_smoothing=0.1,
    beam=4,
    length_penalty=1.,
    backbone=dict(type='UNTransformer', norm_cfg=dict(type='LN')))

# `max_tokens` is per process and batch, including padding; `batch_size` is the maximum number of pairs.
train_dataloader = dict(
    batch_size=1024,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    batch_sampler=dict(type='TokenBatchSampler', max_tokens=4096),
    collate_fn=dict(type='pad_translations'),
    dataset=dict(
        type='TranslationDataset', source='train.src', target='train.tgt', subwords='subwords.model',
        max_length=256))
val_dataloader = dict(
    batch_size=256,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    batch_sampler=dict(type='TokenBatchSampler', max_tokens=4096),
    collate_fn=dict(type='pad_translations'),
    dataset=dict(
        type='TranslationDataset', source='valid.src', target='valid.tgt', subwords='subwords.model'))
test_dataloader = dict(val_dataloader, dataset=dict(
    val_dataloader['dataset'], source='test.src', target='test.tgt'))

val_evaluator = dict(
    type='TranslationScore', source='valid.src', reference='valid.tgt', subwords='subwords.model')
test_evaluator = dict(val_evaluator, source='test.src', reference='test.tgt')

train_cfg = dict(by_epoch=False, max_iters=100000, val_interval=5000)
val_cfg = dict()
test_cfg = dict()

optim_wrapper = dict(
    optimizer=dict(type='Adam', lr=7e-4, betas=(0.9, 0.98), weight_decay=0.),
    # The output layer has the weight of the embedding.
    paramwise_cfg=dict(norm_decay_mult=0., bias_decay_mult=0., bypass_duplicate=True))
param_scheduler = [dict(type='InverseSquareRoot', warmup=4000, by_epoch=False)]

default_hooks = dict(
    logger=dict(type='LoggerHook', interval=100),
    checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=5000, max_keep_ckpts=5))
log_processor = dict(by_epoch=False)
