"""Two processes with separate statistics: one checkpoint, one validation."""
import pytest
import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import HOOKS, METRICS
from torch import nn

import mmunorm  # noqa: F401
from mmunorm.norms import UN, RepBN, TokenBN

from .. import processes
from ..runs import loader, runner

pytestmark = pytest.mark.slow


class Model(BaseModel):

    def __init__(self):
        super().__init__()
        self.norms = nn.Sequential(UN(4, warmup_iters=3), TokenBN(4), RepBN(4))
        self.fc = nn.Linear(4, 1)

    def forward(self, x, mode='loss'):
        y = self.fc(self.norms(x))
        return dict(loss=y.square().mean()) if mode == 'loss' else [dict(y=value) for value in y]


@METRICS.register_module()
class MeanOutput(BaseMetric):

    def process(self, data_batch, data_samples):
        self.results += [float(sample['y'].sum()) for sample in data_samples]

    def compute_metrics(self, results):
        return dict(mean=sum(results))


@HOOKS.register_module()
class KeepStates(Hook):
    """Records this process's statistics before validation and before a checkpoint is saved."""
    priority = 'VERY_LOW'

    def __init__(self):
        self.saved, self.validated = [], []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if (runner.iter + 1) % 4 == 0:
            self.saved.append(state_of(runner.model))
            self.averaged = [state_of(hook.ema_model.module) for hook in runner.hooks if hasattr(hook, 'ema_model')]

    def before_val_epoch(self, runner):
        self.validated.append(state_of(runner.model))


def state_of(model):
    model = getattr(model, 'module', model)
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def train(folder, max_iters, hooks, by_epoch=False, **kwargs):
    torch.manual_seed(0)
    data = [dict(x=torch.randn(5, 4) * (1 + i % 3)) for i in range(16)]
    torch.manual_seed(0)
    run = runner(
        folder, Model(), loader(data), launcher='pytorch', lr=0.05,
        cfg=dict(model_wrapper_cfg=dict(type='MMDistributedDataParallel', broadcast_buffers=False, device_ids=None)),
        val_dataloader=loader(data), val_evaluator=dict(type='MeanOutput'), val_cfg=dict(),
        train_cfg=(dict(by_epoch=True, max_epochs=max_iters // 4, val_interval=1) if by_epoch else
                   dict(by_epoch=False, max_iters=max_iters, val_interval=6)),
        default_hooks=dict(
            logger=None, checkpoint=dict(type='CheckpointHook', interval=1 if by_epoch else 4, by_epoch=by_epoch)),
        hooks=['KeepStates', dict(type='EMAHook', update_buffers=True, momentum=0.3), *hooks], **kwargs)
    run.train()
    kept = next(hook for hook in run.hooks if isinstance(hook, KeepStates))
    return dict(final=state_of(run.model), saved=kept.saved, validated=kept.validated, averaged=kept.averaged)


def several_runs(rank, folder):
    hook = ['OfflineNormHook']
    return dict(plain=train(folder / 'plain', 4, []), averaged=train(folder / 'averaged', 12, hook),
                resumed=train(folder / 'averaged', 12, hook, resume=True,
                              load_from=f'{folder}/averaged/iter_4.pth'),
                epochs=train(folder / 'epochs', 8, hook, by_epoch=True),
                synchronized=train(folder / 'synchronized', 4, [*hook, 'SyncNormsHook']))


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp('ranks')
    return (folder, *processes.run(several_runs, folder))


def mean(a, b):
    return {key: (a[key] + b[key]) / 2 if a[key].is_floating_point() else
            ((a[key] + b[key]).double() / 2).round().long() for key in a}


def equal(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_checkpoint_has_the_mean_over_the_processes(runs):
    """Also that of the averaged model, which EMAHook swaps in."""
    folder, a, b = runs
    plain_a, plain_b = a['plain']['saved'][0], b['plain']['saved'][0]
    assert not torch.equal(plain_a['norms.0.running_var'], plain_b['norms.0.running_var'])
    for rank in (a, b):
        torch.testing.assert_close(rank['averaged']['saved'][0], mean(plain_a, plain_b))
        assert rank['averaged']['saved'][0]['norms.0.num_batches_tracked'] == 4
    checkpoint = torch.load(folder / 'averaged/iter_4.pth', weights_only=False)
    equal(local_state(checkpoint), a['averaged']['saved'][0])
    torch.testing.assert_close(checkpoint['state_dict'], mean(a['plain']['averaged'][0], b['plain']['averaged'][0]))
    equal(a['averaged']['averaged'], b['averaged']['averaged'])
    checkpoint = torch.load(folder / 'epochs/epoch_2.pth', weights_only=False)
    for rank in (a, b):
        equal(local_state(checkpoint), rank['epochs']['final'])


def local_state(checkpoint):
    return {key.removeprefix('module.'): value for key, value in checkpoint['ema_state_dict'].items()
            if key.startswith('module.')}


def test_every_process_validates_the_same_model_and_resumes_as_if_uninterrupted(runs):
    _, a, b = runs
    for run in ('averaged', 'epochs'):
        assert len(a[run]['validated']) == 2
        equal(a[run]['validated'], b[run]['validated'])
    for rank in (a, b):
        equal(rank['resumed']['final'], rank['averaged']['final'])


def test_synchronized_norms_agree_without_it(runs):
    _, a, b = runs
    equal(a['synchronized']['saved'], b['synchronized']['saved'])
    # The variance over all tokens is not the mean of the processes' variances; of mean squares it is.
    key = 'norms.1.running_var'
    assert (a['synchronized']['saved'][0][key] - a['averaged']['saved'][0][key]).abs().max() > 1e-3
