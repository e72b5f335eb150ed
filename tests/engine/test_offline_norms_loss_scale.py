"""A run with a loss scale that changes and overflows ends as one in float32."""
import pytest
import torch
from mmengine.model import BaseModel
from mmengine.optim.optimizer import amp_optimizer_wrapper
from mmengine.registry import HOOKS, OPTIM_WRAPPERS
from mmengine.runner import Runner
from torch import nn

import mmunorm
from mmunorm.engine import set_loss_scale
from mmunorm.norms import MABN, PN, UN

from ..versions import CPUGradScaler

STEPS = 120
NORMS = {
    'UN': lambda: UN(6, warmup_iters=10),
    'MABN': lambda: MABN(6, window=5, warmup_iters=10),
    'PN*': lambda: PN(6, layer_scale=False, warmup_iters=10),
}


def make_model(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), NORMS[norm](), nn.ReLU(), nn.Linear(6, 6), NORMS[norm](),
                         nn.Linear(6, 2))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 4, generator=generator) * (3 if step % 37 == 36 else 1)
    return x, torch.stack([x[:, 0] * x[:, 1], x.sum(1)], 1)


def scaled_run(norm):
    """The model, the steps that were skipped, and the scales. Some gradients overflow."""
    model = make_model(norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = CPUGradScaler(init_scale=2.**20, growth_interval=5)
    skipped, scales = [], []
    for step in range(STEPS):
        x, target = batch(step)
        y = model(x)
        if step % 17 == 5:
            y.register_hook(lambda dy: dy * torch.inf)
        optimizer.zero_grad()
        set_loss_scale(model, scaler)
        scaler.scale((y - target).square().mean()).backward()
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scales[-1]:
            skipped.append(step)
    return model, skipped, scales


def plain_run(norm, skipped):
    """Without a scale; the skipped steps are forward passes and nothing else."""
    model = make_model(norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, target = batch(step)
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        if step not in skipped:
            loss.backward()
            optimizer.step()
    return model


@pytest.mark.parametrize('norm', NORMS)
def test_the_scale_leaves_no_trace(norm):
    """Scales are powers of two, and cancel without rounding."""
    model, skipped, scales = scaled_run(norm)
    assert skipped == [5, 22, 39, 56, 73, 90, 107] and len(set(scales)) > 3
    expected = plain_run(norm, skipped).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_factor_and_none():
    a, b = NORMS['UN'](), NORMS['UN']()
    set_loss_scale(a, torch.tensor(64.))
    for _ in range(20):
        x = torch.randn(5, 6)
        a(x.requires_grad_()).pow(3).sum().mul(64).backward()
        b(x).pow(3).sum().backward()
    assert torch.equal(a.psi, b.psi)
    set_loss_scale(a, None)
    assert a.loss_scale is None


class Model(BaseModel):

    def __init__(self):
        super().__init__()
        self.net = make_model('UN')

    def forward(self, x, target, mode='loss'):
        return dict(loss=(self.net(x) - target).square().mean())


@HOOKS.register_module()
class RecordScale(mmunorm.engine.OfflineNormHook):
    """Writes down each step's scale, as the norms know it."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        super().before_train_iter(runner, batch_idx, data_batch)
        assert runner.optim_wrapper.loss_scaler.get_scale() == runner.model.net[1].loss_scale
        self.scales = [*getattr(self, 'scales', []), runner.model.net[1].loss_scale.item()]


def run_in_mmengine(folder, **wrapper):
    data = [dict(zip(('x', 'target'), (t[0] for t in batch(step)), strict=True)) for step in range(40)]
    torch.manual_seed(0)
    runner = Runner(
        model=Model(), work_dir=str(folder), experiment_name=folder.name,
        train_dataloader=dict(batch_size=8, dataset=data, sampler=dict(type='DefaultSampler', shuffle=False),
                              collate_fn=dict(type='default_collate')),
        train_cfg=dict(by_epoch=True, max_epochs=6),
        custom_hooks=[dict(type='RecordScale')] if wrapper else [],
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01), accumulative_counts=2, **wrapper),
        default_hooks=dict(logger=None, checkpoint=None))
    runner.train()
    return runner


def test_mmengines_amp_wrapper(tmp_path, monkeypatch):
    """On a CPU, which it would refuse, and without its autocast: the scale alone is at stake."""
    monkeypatch.setattr(amp_optimizer_wrapper, 'is_cuda_available', lambda: True)
    monkeypatch.setattr(amp_optimizer_wrapper, 'GradScaler', CPUGradScaler)
    monkeypatch.setattr(OPTIM_WRAPPERS.get('AmpOptimWrapper'), 'optim_context',
                        OPTIM_WRAPPERS.get('OptimWrapper').optim_context)
    scaled = run_in_mmengine(tmp_path / 'scaled', type='AmpOptimWrapper',
                             loss_scale=dict(init_scale=8., growth_interval=2))
    scales = next(hook for hook in scaled.hooks if isinstance(hook, RecordScale)).scales
    assert scales[0] == 8 and scales[-1] == 8 * 2**7
    plain = run_in_mmengine(tmp_path / 'plain')
    for name, value in scaled.model.state_dict().items():
        assert torch.equal(value, plain.model.state_dict()[name]), name
