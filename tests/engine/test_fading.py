"""FadingHook: one norm after the other, exactly resumed, and waiting while the loss explodes."""
import math
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from mmengine.logging import MessageHub
from mmengine.registry import MODELS
from torch import nn

from mmunorm.config.models import build_model
from mmunorm.conversion.fading import FadingNorm, fading_order
from mmunorm.engine import FadingHook, fading
from mmunorm.errors import PreflightError
from mmunorm.norms import UN

from .. import processes, tiny_runs

TRAIN = tiny_runs.load_tool('train')


class Runner(SimpleNamespace):
    """As much of a runner as the hook asks for, on a model of three norms and a loss that is given."""

    def __init__(self, steps=100, kind='FadingUN', **hook):
        norms = [MODELS.build(dict(type=kind, num_features=6)) for _ in range(3)]
        model = nn.ModuleDict(dict(norm1=norms[0], norm2=norms[1], linear=nn.Linear(6, 6), norm=norms[2]))
        self.warnings = []
        super().__init__(model=model, iter=0, cfg={}, max_iters=steps, message_hub=MessageHub(f'fading {id(self)}'),
                         logger=SimpleNamespace(warning=self.warnings.append))
        self.hook = FadingHook(**hook)

    def step(self, loss=1.):
        """A training step; what each norm has left of LayerNorm while it runs."""
        self.hook.before_train_iter(self, 0)
        x = torch.randn(8, 6)
        for name in ('norm1', 'norm2', 'norm'):
            x = self.model[name](x)
        shares = [norm._fade[0] / norm._fade[1] for norm in self.hook._norms]
        self.hook.after_train_iter(self, 0, outputs=dict(loss=torch.tensor(loss)))
        self.iter += 1
        return shares


def test_the_schedule():
    runner = Runner(hold=0.1, static=0.3, measured=4)
    runner.hook.before_train(runner)
    assert runner.hook._norms == [runner.model[name] for name in ('norm2', 'norm1', 'norm')]
    rows = torch.tensor([runner.step() for _ in range(100)])
    assert rows[:11].eq(0).all() and rows[70:].eq(1).all()
    for i, begin in enumerate((10, 30, 50)):
        torch.testing.assert_close(rows[begin:begin + 21, i], torch.arange(21) / 20)
    assert not runner.warnings
    runner.hook.after_train(runner)
    assert not runner.warnings


def test_a_norm_is_fitted_on_the_steps_before_its_fade(monkeypatch):
    runner = Runner(hold=0.1, static=0.3, measured=4)
    runner.hook.before_train(runner)
    seen, fitted = {}, []
    refit = FadingNorm.refit
    monkeypatch.setattr(FadingNorm, 'refit', lambda self: (fitted.append((runner.iter, self.sums[0, 0].item())),
                                                           refit(self)))
    for _ in range(60):
        runner.step()
        seen[runner.iter] = [norm.sums[0, 0].item() for norm in runner.hook._norms]
    # 4 steps of 8 tokens each, the last of which is that before the fade's first step.
    assert fitted == [(10, 32), (30, 32), (50, 32)]
    assert seen[7] == [0, 0, 0] and seen[8] == [8, 0, 0] and seen[12] == [0, 0, 0]


@pytest.mark.parametrize('bad', [3., math.nan, math.inf])
def test_it_waits_while_the_loss_explodes(bad):
    runner = Runner()
    runner.hook.before_train(runner)
    for _ in range(20):
        runner.step()
    before = runner.step()
    for _ in range(5):
        during = runner.step(bad)
    assert during[0] == before[0] + 1 / runner.hook._length  # that of the last good step
    assert runner.step()[0] == during[0] and runner.step()[0] > during[0]


def test_a_loss_that_stays_high_is_the_new_average():
    runner = Runner(steps=1000)
    runner.hook.before_train(runner)
    for _ in range(50):
        runner.step()
    for _ in range(120):
        runner.step(3.)
    clock = runner.hook._clock
    runner.step(3.)
    assert runner.hook._clock == clock + 1


def test_a_run_that_ends_before_the_fade_says_so():
    runner = Runner(static=0.)
    runner.hook.before_train(runner)
    for i in range(100):
        runner.step(1. if i < 50 else math.nan)
    runner.hook.after_train(runner)
    assert '2 of 3 norms are still LayerNorm in part, because the loss exploded in 50 steps' in runner.warnings[0]


@pytest.mark.parametrize('arguments, match', [
    (dict(hold=0.7, static=0.3), 'hold and static must not be negative, and less than 1 together'),
    (dict(hold=-0.1), 'hold=-0.1'),
    (dict(factor=1), 'factor must be more than 1, got 1'),
    (dict(measured=0), 'measured must be an int of at least 1, got 0'),
])
def test_bad_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        FadingHook(**arguments)


def test_what_is_refused(monkeypatch):
    runner = Runner(steps=4)
    with pytest.raises(PreflightError, match='3 norms cannot fade one after the other in 2 steps, of 4'):
        runner.hook.before_train(runner)
    runner = Runner()
    runner.model['norm2'].load_state_dict(UN(6).state_dict(), strict=False)
    with pytest.raises(PreflightError, match='norm2 was loaded from a model without LayerNorm'):
        runner.hook.before_train(runner)
    runner = Runner()
    runner.cfg['compile'] = True
    monkeypatch.setattr(fading, 'sees_attributes', lambda: False)
    with pytest.raises(PreflightError, match='does not notice that a norm of a compiled model fades'):
        runner.hook.before_train(runner)
    runner.model = nn.Linear(6, 6)
    with pytest.raises(PreflightError, match='the model has no norm that fades'):
        runner.hook.before_train(runner)


@pytest.fixture
def recipe(tmp_path, in_a_folder):
    """The tiny classifier that fades and is distilled in 40 steps, and its LayerNorm checkpoint."""
    base, _, _ = tiny_runs.untrained_classifier(tmp_path)
    cfg = Config.fromfile(base)
    cfg.model.backbone.norm_cfg = dict(type='LN')
    checkpoint = tiny_runs.save_weights(cfg, tmp_path / 'ln.pth', ('dark', 'light'))
    config = tmp_path / 'faded.py'
    config.write_text(f"""
_base_ = ['{base}']
model = dict(backbone=dict(norm_cfg=dict(type='FadingUN')))
load_from = '{checkpoint}'
custom_hooks = [dict(type='FadingHook'), dict(type='DistillationHook', checkpoint=load_from)]
optim_wrapper = dict(optimizer=dict(lr=0.01))
train_cfg = dict(max_epochs=20, val_interval=10)
default_hooks = dict(checkpoint=dict(interval=1))
""")
    return config


def states(path):
    return torch.load(path, map_location='cpu', weights_only=False)['state_dict']


@pytest.mark.slow
@pytest.mark.parametrize('ema', [False, True])
def test_a_run_ends_as_a_plain_model_and_resumes_exactly(recipe, ema, capsys):
    if ema:
        text = recipe.read_text().replace("custom_hooks = [", "custom_hooks = [dict(type='EMAHook', "
                                          "ema_type='BufferedEMA', momentum=0.2), ")
        recipe.write_text(text)
    tiny_runs.call(TRAIN, recipe, '--work-dir', 'whole')
    assert 'missing' not in ''.join(capsys.readouterr())
    tiny_runs.call(TRAIN, recipe, '--work-dir', 'resumed', '--resume', 'whole/epoch_11.pth')
    cfg = Config.fromfile(recipe)
    cfg.model.backbone.norm_cfg = dict(type='UN')
    plain = build_model(cfg)
    last = states('whole/epoch_20.pth')
    plain.load_state_dict(last)  # no LayerNorm is left, and no teacher
    assert plain.backbone.norm1.num_batches_tracked > 0
    resumed = states('resumed/epoch_20.pth')
    assert last.keys() == resumed.keys()
    for name, value in last.items():
        assert torch.equal(value, resumed[name]), name

    # The first epoch is LayerNorm's; in the middle, some norms have faded, and one is on the way.
    cfg.model.backbone.norm_cfg = dict(type='FadingUN')
    order = fading_order([name for name, norm in build_model(cfg).named_modules() if isinstance(norm, FadingNorm)])
    left = [f'{name}.fade' in states('whole/epoch_8.pth') for name in order]
    assert left == sorted(left) and {False, True} == set(left)
    done = [states('whole/epoch_8.pth')[f'{name}.fade'].tolist() for name, is_left in zip(order, left, strict=True)
            if is_left]
    assert 0 < done[0][0] < done[0][1] and done[-1][0] == 0
    assert all(f'{name}.fade' in states('whole/epoch_1.pth') for name in order)


def refit_on(rank):
    norm = MODELS.build(dict(type='FadingUN', num_features=4))
    norm.measures = True
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 4, generator=generator)
    norm(x[:5] if rank == 0 else x[5:])
    norm.refit()
    return norm.state_dict()


@pytest.mark.slow
def test_processes_are_fitted_together():
    a, b = processes.run(refit_on)
    norm = MODELS.build(dict(type='FadingUN', num_features=4))
    norm.measures = True
    norm(torch.randn(12, 4, generator=torch.Generator().manual_seed(0)))
    norm.refit()
    for name, value in norm.state_dict().items():
        torch.testing.assert_close(a[name], value, msg=name)
        assert torch.equal(a[name], b[name]), name
