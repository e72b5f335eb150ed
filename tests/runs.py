"""Runs of mmengine's Runner: a few steps on a few samples in memory."""
import os

from mmengine.runner import Runner


def loader(dataset, batch_size=2, **kwargs):
    """The config of a loader that returns samples in their order."""
    return {'dataset': dataset, 'batch_size': batch_size, 'sampler': dict(type='DefaultSampler', shuffle=False),
            'collate_fn': dict(type='default_collate'), **kwargs}


def runner(work_dir, model, train_dataloader, max_iters=None, hooks=(), interval=6, lr=0.1, **kwargs):
    """A Runner of `max_iters` steps of SGD with a checkpoint every `interval` steps, unless `kwargs` say otherwise."""
    settings = dict(train_cfg=dict(by_epoch=False, max_iters=max_iters),
                    optim_wrapper=dict(optimizer=dict(type='SGD', lr=lr)),
                    default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=interval, by_epoch=False)))
    return Runner(model=model, work_dir=str(work_dir), train_dataloader=train_dataloader,
                  custom_hooks=[dict(type=hook) if isinstance(hook, str) else hook for hook in hooks],
                  experiment_name=os.urandom(8).hex(), **{**settings, **kwargs})
