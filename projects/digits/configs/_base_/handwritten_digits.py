# Handwritten digits of 8x8 pixels, bundled with scikit-learn.
data_preprocessor = dict(num_classes=10, mean=[78.], std=[96.], to_rgb=False)

train_dataloader = dict(
    batch_size=32,
    num_workers=0,
    # The last batch would have only 2 images, with a noisy gradient and noisy statistics.
    drop_last=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(type='HandwrittenDigits', split='train', pipeline=[dict(type='PackInputs')]))
val_dataloader = dict(
    batch_size=64,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='HandwrittenDigits', split='val', pipeline=[dict(type='PackInputs')]))
test_dataloader = val_dataloader

val_evaluator = dict(type='Accuracy', topk=(1, ))
test_evaluator = val_evaluator
