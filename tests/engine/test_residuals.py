import logging

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.runner import Runner

from mmunorm.backbones import UNVisionTransformer
from mmunorm.engine import ResidualHook


class Model(BaseModel):

    def __init__(self, residual_cfg):
        super().__init__()
        arch = dict(embed_dims=8, num_layers=2, num_heads=2, feedforward_channels=12)
        self.backbone = UNVisionTransformer(arch, img_size=16, patch_size=8, norm_cfg=dict(type='LN'),
                                            residual_cfg=residual_cfg)

    def forward(self, x, mode='loss'):
        return dict(loss=self.backbone(x)[0].square().mean())


def runner(work_dir, max_iters, residual_cfg=None, optim_wrapper=None, **kwargs):
    torch.manual_seed(0)
    return Runner(
        model=Model(residual_cfg or dict(type='BranchNorm', warmup_iters=8)),
        work_dir=str(work_dir),
        train_dataloader=dict(batch_size=2, dataset=[dict(x=torch.randn(3, 16, 16)) for _ in range(8)],
                              sampler=dict(type='DefaultSampler', shuffle=False),
                              collate_fn=dict(type='default_collate')),
        train_cfg=dict(by_epoch=False, max_iters=max_iters),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01), **(optim_wrapper or {})),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=6, by_epoch=False)),
        custom_hooks=[dict(type='ResidualHook')],
        experiment_name=work_dir.name,
        **kwargs)


def train(*args, **kwargs):
    run = runner(*args, **kwargs)
    run.train()
    return run.model.backbone


@pytest.fixture
def warned(monkeypatch):
    found = []
    monkeypatch.setattr(logging.Logger, 'warning', lambda self, message, *args: found.append(message))
    return lambda: [message for message in found if 'BranchNorm' in message]


def test_counts_updates_and_not_iterations(tmp_path, warned):
    assert train(tmp_path / 'plain', 12).update_clock.updates == 12
    accumulated = train(tmp_path / 'accumulated', 12, optim_wrapper=dict(accumulative_counts=4),
                        residual_cfg=dict(type='BranchNorm', warmup_iters=3))
    assert accumulated.update_clock.updates == 3
    assert warned() == []


def test_warns_of_a_run_that_ends_before_t(tmp_path, warned):
    train(tmp_path / 'short', 7)
    assert warned() == [
        "BranchNorm's branches never get their whole weight: the run ends at update 7, and warmup_iters=8. Choose a "
        'smaller warmup_iters in residual_cfg.']


def test_resumes_in_the_middle_of_the_ramp(tmp_path, warned):
    whole = train(tmp_path / 'whole', 12)
    checkpoint = str(tmp_path / 'whole' / 'iter_6.pth')
    saved = torch.load(checkpoint, weights_only=False)['state_dict']
    assert saved['backbone.update_clock.updates'] == 6
    resumed = train(tmp_path / 'resumed', 12, load_from=checkpoint, resume=True)
    assert resumed.update_clock.updates == 12
    tuned = train(tmp_path / 'tuned', 4, load_from=checkpoint)
    assert tuned.update_clock.updates == 10
    assert warned() == [] and whole.update_clock.updates == 12


def test_a_second_train_counts_once(tmp_path):
    run = runner(tmp_path, 9)
    run.train()
    ResidualHook().before_train(run)
    run.optim_wrapper.optimizer.step()
    assert run.model.backbone.update_clock.updates == 10


def test_admin_measures_a_batch_of_a_new_run_and_no_other(tmp_path):
    admin = dict(type='Admin')
    first = train(tmp_path / 'first', 6, residual_cfg=admin)
    weights = [layer.residual2.weight for layer in first.layers]
    assert all((weight - 1).abs().min() > 1e-3 for weight in weights)
    run = runner(tmp_path / 'tuned', 1, residual_cfg=admin, load_from=str(tmp_path / 'first' / 'iter_6.pth'))
    run.load_or_resume()
    ResidualHook().before_train(run)
    for layer, weight in zip(run.model.backbone.layers, weights, strict=True):
        assert torch.equal(layer.residual2.weight, weight)
