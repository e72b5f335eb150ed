import json
import math
import os
import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.hooks import CheckpointHook
from mmengine.logging import MessageHub
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmunorm.engine import DivergenceError, DivergenceHook, divergence
from mmunorm.engine.divergence import LAST_GOOD, RECORD
from mmunorm.norms import UN, OfflineNorm, TokenBN
from mmunorm.norms.layers import norm_layers

from .. import processes, tiny_runs
from ..norms.cases import NORMS, OFFLINE, NoSync
from ..versions import compiles_as_one_graph, needs_float16_autocast

TRAIN = tiny_runs.load_tool('train')


class Model(nn.Module):
    """Three norms in a row, executed in another order than they are registered."""

    def __init__(self):
        super().__init__()
        self.last = nn.LayerNorm(4)
        self.first = nn.LayerNorm(4)
        self.middle = UN(4)
        self.scales = dict(first=1.0, middle=1.0, last=1.0)

    def forward(self, x):
        for name in ('first', 'middle', 'last'):
            x = getattr(self, name)(x)
            with torch.no_grad():
                getattr(self, name).bias.fill_(self.scales[name] - 1)
        return x


@pytest.fixture
def runner(tmp_path, request):
    errors = []
    return SimpleNamespace(
        model=Model(), work_dir=str(tmp_path), iter=0, max_iters=1000, hooks=[],
        message_hub=MessageHub(f'hub_{request.node.name}'), optim_wrapper=SimpleNamespace(),
        logger=SimpleNamespace(error=errors.append), errors=errors)


def go(hook, runner, losses, scales=None):
    """One step for each loss; `scales` is {step: {layer: bias + 1}}, as biases move before the next step."""
    for loss in losses:
        runner.model.scales.update((scales or {}).get(runner.iter + 1, {}))
        runner.model(torch.ones(2, 4))
        hook.after_train_iter(runner, 0, outputs=dict(loss=torch.tensor(loss)))
        runner.iter += 1


@pytest.mark.parametrize('interval', [1, 3, 100])
@pytest.mark.parametrize(('loss', 'text'), [(math.nan, 'the loss is nan'), (math.inf, 'the loss is inf'),
                                            (6.1, 'more than 3 times the 2 of the start')])
def test_stops_at_the_first_bad_step(runner, interval, loss, text, tmp_path):
    hook = DivergenceHook(patience=3, factor=3.0, interval=interval)
    hook.before_train(runner)
    with pytest.raises(DivergenceError, match=f'step 7: .*{text}'):
        go(hook, runner, [1.0, 2.0, 3.0, 5.9, loss, 5.0] + [loss] * 5)
        hook.after_train_epoch(runner)
    record = json.loads((tmp_path / RECORD).read_text())
    assert record['step'] == 7 and record['start_loss'] == 2.0 and record['checkpoint'] is None
    assert record['loss'] == (pytest.approx(loss) if math.isfinite(loss) else None)
    assert record['message'] == runner.errors[0]


def test_a_run_that_recovers_goes_on(runner, tmp_path):
    hook = DivergenceHook(patience=3, interval=2)
    hook.before_train(runner)
    go(hook, runner, [2.0] * 3 + [math.nan, 9.0, 1.0] * 20)
    hook.after_train_epoch(runner)
    assert not (tmp_path / RECORD).exists()


def test_an_explosion_counts_if_asked_for(runner):
    hook = DivergenceHook(patience=3, interval=1)
    hook.before_train(runner)
    go(hook, runner, [0.1] * 10 + [1e6] * 10)
    assert hook._bad_steps == 0 and not runner.errors


def test_an_explosion_among_the_first_steps(runner):
    hook = DivergenceHook(patience=10, factor=3.0)
    hook.before_train(runner)
    with pytest.raises(DivergenceError, match='step 5: the loss is 1e.06, more than 3 times the 2.3'):
        go(hook, runner, [2.3] * 4 + [1e6] * 40)


@pytest.mark.parametrize(('last', 'stops'), [(math.nan, True), (100.0, False)])
def test_a_run_that_ends_in_bad_steps(runner, last, stops, tmp_path):
    hook = DivergenceHook(patience=10, interval=1)
    hook.before_train(runner)
    go(hook, runner, [2.3] * 20 + [last] * 4)
    if stops:
        with pytest.raises(DivergenceError, match='step 21: the loss is nan.* 4 steps in a row'):
            hook.after_train(runner)
    else:
        hook.after_train(runner)
    assert (tmp_path / RECORD).exists() == stops


def test_names_the_first_layer_in_the_order_of_execution(runner, tmp_path):
    hook = DivergenceHook(patience=2, interval=1)
    hook.before_train(runner)
    with pytest.raises(DivergenceError, match='non-finite output is middle'):
        go(hook, runner, [1.0] * 10, {4: dict(middle=math.inf)})
    assert json.loads((tmp_path / RECORD).read_text())['layer'] == 'middle'


def test_names_the_layer_that_has_grown_most(runner, tmp_path):
    hook = DivergenceHook(patience=2, factor=3.0, interval=4)
    hook.before_train(runner)
    scales = {2: dict(first=1.5, middle=1.5, last=1.5), 5: dict(first=3.0, last=90.0)}
    with pytest.raises(DivergenceError, match='the output of last has grown most'):
        go(hook, runner, [1.0] * 5 + [50.0] * 3, scales)
    assert json.loads((tmp_path / RECORD).read_text())['layer'] == 'last'


class Saves:
    """A CheckpointHook of `max_keep_ckpts=1` that writes `text` for a checkpoint."""

    def __init__(self, runner):
        self.runner = runner
        self.last = None

    def __call__(self, text):
        if self.last is not None:
            self.last.unlink()
        self.last = Path(self.runner.work_dir, f'iter_{self.runner.iter}.pth')
        self.last.write_text(text)
        self.runner.message_hub.update_info('last_ckpt', str(self.last))


def checkpoint_of(folder):
    path = json.loads((folder / RECORD).read_text())['checkpoint']
    return path and Path(path).read_text()


@pytest.fixture(params=['links', 'copies'])
def file_system(request, monkeypatch):
    def refuse(*paths):
        raise OSError('no links here')

    if request.param == 'copies':
        monkeypatch.setattr(os, 'link', refuse)
    return request.param


def test_a_checkpoint_outlives_those_that_are_saved_while_steps_are_bad(runner, tmp_path, file_system):
    hook, save = DivergenceHook(patience=5, interval=1), Saves(runner)
    hook.before_train(runner)
    go(hook, runner, [1.0] * 3)
    save('good')
    go(hook, runner, [1.0] * 2 + [math.nan] * 2)
    save('bad')
    with pytest.raises(DivergenceError, match=LAST_GOOD):
        go(hook, runner, [math.nan] * 3)
    assert checkpoint_of(tmp_path) == 'good'


def test_nothing_saved_while_steps_are_bad_is_good(runner, tmp_path, file_system):
    hook, save = DivergenceHook(patience=4, interval=1), Saves(runner)
    hook.before_train(runner)
    go(hook, runner, [1.0, 1.0, math.nan])
    save('bad')
    with pytest.raises(DivergenceError, match='No checkpoint before it is known to be good'):
        go(hook, runner, [math.nan] * 3)
    assert checkpoint_of(tmp_path) is None and not (tmp_path / LAST_GOOD).exists()


@pytest.mark.parametrize('interval', [1, 2, 100])
def test_weights_that_an_update_broke_just_before_they_were_saved(runner, tmp_path, interval):
    hook, save = DivergenceHook(patience=3, interval=interval), Saves(runner)
    runner.hooks = [CheckpointHook(interval=3, by_epoch=False)]
    hook.before_train(runner)
    go(hook, runner, [1.0] * 3)
    save('good')
    go(hook, runner, [1.0] * 3)
    save('broken by the update of step 6')
    with pytest.raises(DivergenceError, match='step 7'):
        go(hook, runner, [math.nan] * 3)
        hook.after_train_epoch(runner)
    assert checkpoint_of(tmp_path) == 'good'


def test_a_checkpoint_of_bad_steps_that_recover_is_good(runner, tmp_path):
    hook, save = DivergenceHook(patience=3, interval=1), Saves(runner)
    hook.before_train(runner)
    go(hook, runner, [1.0, math.nan])
    save('good after all')
    with pytest.raises(DivergenceError):
        go(hook, runner, [math.nan] + [1.0] + [math.nan] * 3)
    assert checkpoint_of(tmp_path) == 'good after all'


def test_a_run_that_ends_well_leaves_no_second_name(runner, tmp_path, file_system):
    hook, save = DivergenceHook(patience=3, interval=1), Saves(runner)
    hook.before_train(runner)
    for text in 'abc':
        save(text)
        go(hook, runner, [1.0, 2.0, 3.0])
    # What a copy would cost at each save, a link does not.
    assert (tmp_path / LAST_GOOD).exists() == (file_system == 'links')
    hook.after_train(runner)
    assert not (tmp_path / LAST_GOOD).exists()


def test_a_run_resumed_from_the_second_name_keeps_it(runner, tmp_path):
    (tmp_path / LAST_GOOD).write_text('good')
    runner.message_hub.update_info('last_ckpt', str(tmp_path / 'gone.pth'))
    hook = DivergenceHook(patience=3, interval=1)
    hook.before_train(runner)
    with pytest.raises(DivergenceError):
        go(hook, runner, [1.0] + [math.nan] * 3)
    assert checkpoint_of(tmp_path) == 'good'


class Norms(nn.Module):
    """Three norms; `forward` takes the input of each, and the gradient at each output."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([UN(4, warmup_iters=0), nn.LayerNorm(4), TokenBN(4)])

    def step(self, inputs, gradients):
        for norm, x, dy in zip(self.norms, inputs, gradients, strict=True):
            norm(x).backward(dy)


def run_norms(runner, hook, steps, bad):
    """Steps of finite loss; `bad` is {step: (layer, input, gradient)}."""
    hook.before_train(runner)
    for step in range(1, steps + 1):
        inputs, gradients = torch.randn(3, 5, 4), torch.randn(3, 5, 4)
        if step in bad:
            layer, x, dy = bad[step]
            inputs[layer] *= x
            gradients[layer] *= dy
        runner.model.step(inputs, gradients)
        hook.after_train_iter(runner, 0, outputs=dict(loss=torch.tensor(1.0)))
        runner.iter += 1
    hook.after_train(runner)


@pytest.mark.parametrize(('layer', 'x', 'dy', 'text'), [
    (0, 1e25, 1, 'input is too large for its statistics is norms.0'),
    (2, 1e25, 1, 'input is too large for its statistics is norms.2'),
    (0, 1, math.inf, 'non-finite gradient, in the order of the backward pass, is norms.0'),
    (1, 1, math.nan, 'non-finite gradient, in the order of the backward pass, is norms.1')])
def test_statistics_that_are_not_finite_stop_a_run_whose_loss_is(runner, layer, x, dy, text):
    runner.model = Norms()
    bad = dict.fromkeys(range(5, 40), (layer, x, dy))
    with pytest.raises(DivergenceError, match=f'at step 5: the loss is 1; .*{text}'):
        run_norms(runner, DivergenceHook(patience=4, interval=3), 40, bad)
    assert runner.iter <= 10
    # UN itself gets by, which is why nothing else tells.
    assert all(torch.isfinite(buffer).all() for buffer in runner.model.norms[0].buffers())


class Row(nn.Module):
    """Three linear layers with a norm behind each; `spoil` changes what the second norm gets."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(6) if name == 'LN' else NORMS[name](6) for _ in range(3))
        self.spoil = lambda x: x

    def block(self, i, x):
        x = self.linears[i](x)
        return self.norms[i](self.spoil(x) if i == 1 else x)

    def forward(self, x, run):
        for i in range(3):
            x = run(partial(self.block, i), x)
        return x


def put(value, x):
    x = x.clone()
    x[1, 2] = value
    return x


def fill(name, value, norms):
    with torch.no_grad():
        getattr(norms[1], name)[-3:] = value


TROUBLES = {
    'NaN weight': (partial(fill, 'weight', math.nan), None),
    'infinite bias': (partial(fill, 'bias', -math.inf), None),
    'huge weight': (partial(fill, 'weight', 3e38), None),  # overflows in the largest outputs alone
    'NaN': (None, partial(put, math.nan)),
    'infinity': (None, partial(put, -math.inf)),
    'large input': (None, lambda x: x * 1e25),
    'large mean': (None, lambda x: x + 1e25),
}


@pytest.mark.parametrize('mode', ['float32', 'bfloat16', pytest.param('float16', marks=needs_float16_autocast),
                                  'with_cp', 'with_cp reentrant'])
@pytest.mark.parametrize('name', [*OFFLINE, 'LN'])
def test_finds_step_and_layer_of_every_trouble(runner, monkeypatch, name, mode):
    """By its statistics, and by a look at the tensors."""
    dtype = getattr(torch, mode, torch.float32)

    def run(block, x):
        return checkpoint(block, x, use_reentrant='reentrant' in mode) if 'with_cp' in mode else block(x)

    for reads in (False, True):
        if reads:
            monkeypatch.setattr(OfflineNorm, 'newest_step', None)
        for spoil_norms, spoil_input in TROUBLES.values():
            runner.model, runner.iter = Row(name), 0
            hook = DivergenceHook(patience=2, interval=3)
            hook.before_train(runner)
            with pytest.raises(DivergenceError, match='at step 5: .* layer .* is norms.1. 2 steps'):
                for step in range(1, 10):
                    if step == 5 and spoil_norms:
                        spoil_norms(runner.model.norms)
                    if step == 5 and spoil_input:
                        runner.model.spoil = spoil_input
                    with nullcontext() if dtype == torch.float32 else torch.autocast('cpu', dtype):
                        y = runner.model(torch.randn(2, 8, 6, requires_grad=True), run)
                    y.float().sum().backward()
                    hook.after_train_iter(runner, 0, outputs=dict(loss=torch.tensor(1.0)))
                    runner.iter += 1


@pytest.mark.parametrize(('name', 'parameter', 'value', 'dtype'), [
    ('UN', 'weight', 1e5, torch.float16), ('RepBN', 'eta', math.nan, torch.float32),
    ('RepBN', 'eta', 3e38, torch.float32)])
def test_an_output_that_is_not_finite_though_all_statistics_are(runner, name, parameter, value, dtype):
    runner.model = Row(name).norms
    fill(parameter, value, runner.model)
    hook = DivergenceHook(patience=1, interval=1)
    hook.before_train(runner)
    runner.model[1](torch.randn(64, 6).to(dtype))
    with pytest.raises(DivergenceError, match='non-finite output is 1'):
        hook.after_train_iter(runner, 0, outputs=dict(loss=torch.tensor(1.0)))


@pytest.mark.parametrize('name', [*OFFLINE, 'LN'])
def test_how_much_an_output_has_grown(runner, name):
    """An estimate from statistics is near enough to what the tensors say."""
    runner.model = Row(name)
    hook = DivergenceHook(patience=1, factor=3.0, interval=1)
    hook.before_train(runner)
    for i in range(15):
        if i == 14:
            with torch.no_grad():
                for parameter in runner.model.norms[1].parameters():
                    parameter *= 30
                    parameter += 30 * ('bias' in name)
        runner.model(torch.randn(2, 8, 6), lambda block, x: block(x))
        if i < 14:
            hook.after_train_iter(runner, 0, outputs=dict(loss=torch.tensor(1.0)))
            runner.iter += 1
    with pytest.raises(DivergenceError) as error:
        hook.after_train_iter(runner, 0, outputs=dict(loss=torch.tensor(9.0)))
    layer, growth = re.search('output of (.*) has grown most, (.*) times', str(error.value)).groups()
    assert layer == 'norms.1' and 15 < float(growth) < 60


def test_an_offline_norm_that_is_stable_is_not_blamed_for_its_input(runner):
    """The output of PN, which lags behind, grows with its input, that of UN in its warm-up does not."""
    runner.model = nn.Sequential(UN(4), NORMS['PN*'](4))
    hook = DivergenceHook(patience=1, factor=3.0, interval=1)
    hook.before_train(runner)
    with pytest.raises(DivergenceError, match=r'output of 1 has grown most, [3-7]\d\.'):
        for step in range(1, 20):
            for norm in runner.model:
                norm(torch.randn(64, 4) * (50 if step == 12 else 1))
            hook.after_train_iter(runner, 0, outputs=dict(loss=torch.tensor(9.0 if step == 12 else 1.0)))


def test_which_tensors_are_read(runner, monkeypatch):
    """None of an offline norm's, but where statistics do not tell all."""
    def read_by(norm, call):
        runner.model = nn.Sequential(norm)
        hook = DivergenceHook(interval=100)
        hook.before_train(runner)
        norm(torch.randn(3, 5, 6))  # what is remembered of it says nothing of the next
        read = []
        with monkeypatch.context() as patch:
            patch.setattr(divergence, '_largest', lambda x: (read.append(x), largest(x))[1])
            call(norm, torch.randn(3, 5, 6, requires_grad=True))
        hook.after_train(runner)
        return len(read)

    def compiled(norm, x):
        norm.forward = torch.compile(norm.forward, backend='eager')
        norm(x)

    def recomputed(norm, x):
        checkpoint(norm, x, use_reentrant=True).sum().backward()

    largest = divergence._largest
    reads = {name: read_by(NORMS[name](6), lambda norm, x: norm(x)) for name in OFFLINE}
    assert reads == dict.fromkeys(OFFLINE, 0) | dict(PN=2, PRepBN=2)
    assert read_by(UN(6), lambda norm, x: norm(x.bfloat16())) == 0
    assert read_by(UN(6), lambda norm, x: norm(x.half())) == 1  # its output
    assert read_by(UN(6), lambda norm, x: norm(x, torch.ones(3, 5).bool())) == 2
    assert read_by(UN(6), lambda norm, x: norm(x, pad_mask=torch.ones(3, 5).bool())) == 2
    assert read_by(UN(6), compiled) == 2
    assert read_by(nn.LayerNorm(6), lambda norm, x: norm(x)) == 2
    for norm, count in ((UN(6), 0), (nn.LayerNorm(6), 2)):  # once alone
        assert read_by(norm, recomputed) == count


@pytest.mark.parametrize('name', [*OFFLINE, 'LN'])
def test_watching_waits_for_no_device(runner, name):
    runner.model = Row(name)
    hook = DivergenceHook(interval=100)
    hook.before_train(runner)
    with NoSync():
        for _ in range(4):
            runner.model(torch.randn(2, 8, 6), lambda block, x: block(x)).sum().backward()
            hook.after_train_iter(runner, 0, outputs=dict(loss=torch.tensor(1.0)))
    assert len(hook._rows) == 4  # which are looked at later


def test_weights_that_are_there_for_the_forward_pass_alone(runner):
    """As FSDP's hooks would have it."""
    norm = runner.model = UN(4)
    norm.register_forward_hook(lambda *_: setattr(norm, 'weight', None))
    hook = DivergenceHook(patience=1, interval=1)
    hook.before_train(runner)
    norm(torch.randn(5, 4))
    hook.after_train_iter(runner, 0, outputs=dict(loss=torch.tensor(1.0)))
    assert hook._good is not None and math.isfinite(hook._good[1])


def test_a_gradient_that_overflows_under_a_loss_scale_now_and_then_is_normal(runner, tmp_path):
    overflows = {step: (1, 1, math.inf) for step in range(1, 41) if step % 4}
    overflows[40] = (1, 1, math.inf)
    for scaled in (True, False):
        runner.model, runner.iter = Norms(), 0
        runner.optim_wrapper = SimpleNamespace(**(dict(loss_scaler=object()) if scaled else {}))
        run = partial(run_norms, runner, DivergenceHook(patience=5), 40, overflows)
        if scaled:
            run()
        else:
            # Without one the last step's update has broken the weights, and nothing comes to show it.
            with pytest.raises(DivergenceError, match='step 37'):
                run()


def test_a_frozen_norm_and_one_without_weight(runner):
    runner.model = Norms()
    runner.model.norms[1].requires_grad_(False)
    runner.model.norms.append(nn.LayerNorm(4, elementwise_affine=False))
    hook = DivergenceHook()
    hook.before_train(runner)
    assert len(hook._names) == len(list(norm_layers(runner.model)))
    assert len(hook._handles) == 2 * len(hook._names) - 2  # neither has a gradient to watch


@pytest.mark.parametrize('outputs', [None, dict(log_vars=1)])
def test_a_model_that_returns_no_loss_is_not_watched(runner, outputs):
    hook = DivergenceHook(patience=1, interval=1)
    hook.before_train(runner)
    runner.model(torch.full((2, 4), math.nan))
    hook.after_train_iter(runner, 0, outputs=outputs)
    assert not hook._rows and not runner.errors


def test_a_compiled_model_is_one_graph(runner):
    hook = DivergenceHook(patience=2, interval=1)
    hook.before_train(runner)
    layer = runner.model.last
    compiled = torch.compile(layer, backend='eager', fullgraph=compiles_as_one_graph())
    with pytest.raises(DivergenceError, match='the first norm layer with a non-finite gradient'):
        for _ in range(2):
            compiled(torch.randn(2, 4)).backward(torch.full((2, 4), math.inf))
            hook.after_train_iter(runner, 0, outputs=dict(loss=torch.tensor(1.0)))


def test_the_start_is_remembered_by_a_resumed_run(runner):
    hook = DivergenceHook(patience=2)
    hook.before_train(runner)
    go(hook, runner, [1.0] * 4)
    hook.after_train_epoch(runner)
    # The hub's state is what a checkpoint holds.
    state = runner.message_hub.state_dict()
    runner.message_hub = MessageHub('resumed')
    runner.message_hub.load_state_dict(state)
    resumed = DivergenceHook(patience=2, factor=3.0)
    resumed.before_train(runner)
    with pytest.raises(DivergenceError, match='more than 3 times the 1 of the start'):
        go(resumed, runner, [4.0] * 20)


def test_advice_fits_the_run(runner):
    runner.model.middle = UN(4, outlier_filter=False)
    hook = DivergenceHook(patience=1, interval=1)
    hook.before_train(runner)
    with pytest.raises(DivergenceError, match='filter on .*clip gradients .*learning rate.*warmup_iters'):
        go(hook, runner, [math.nan])


def test_no_advice_that_the_norm_cannot_take(runner):
    """TokenBN has neither filter nor warm-up."""
    runner.model.middle = TokenBN(4)
    hook = DivergenceHook(patience=1, interval=1)
    hook.before_train(runner)
    with pytest.raises(DivergenceError) as error:
        hook.after_train_iter(runner, 0, outputs=dict(loss=torch.tensor(math.nan)))
    assert 'learning rate' in str(error.value)
    assert 'filter' not in str(error.value) and 'warmup_iters' not in str(error.value)



def test_hooks_are_removed_and_evaluation_is_not_watched(runner):
    hook = DivergenceHook()
    hook.before_train(runner)
    runner.model.eval()(torch.ones(2, 4))
    assert not hook._peaks
    hook.after_train(runner)
    runner.model.train()(torch.ones(2, 4))
    assert not hook._peaks


@pytest.mark.parametrize(('arguments', 'text'), [
    (dict(patience=0), 'patience'), (dict(interval=0.5), 'interval'),
    (dict(factor=1), 'factor must be more than 1, got 1')])
def test_wrong_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        DivergenceHook(**arguments)


@pytest.mark.parametrize('patience', [2, None])
def test_a_real_run_ends_with_one_line_and_status_3(tmp_path, monkeypatch, capsys, patience):
    """Also where the config does not name the hook."""
    tiny_runs.skip_config_formatting(monkeypatch)
    config = tiny_runs.write_classifier(tmp_path)
    if patience is not None:
        hook = f"custom_hooks = [dict(type='DivergenceHook', patience={patience})]\n"
        config.write_text(config.read_text() + hook)
    work_dir = tmp_path / 'work'
    with pytest.raises(SystemExit) as stop:
        # The first step's update throws the weights out of float32.
        tiny_runs.call(TRAIN, config, '--work-dir', work_dir, '--cfg-options', 'train_cfg.max_epochs=8',
                       'optim_wrapper.optimizer.lr=1e30', 'default_hooks.checkpoint.max_keep_ckpts=1')
    assert stop.value.code == 3
    printed = capsys.readouterr().err
    assert 'error: the run diverged at step ' in printed.splitlines()[-1]
    record = json.loads((work_dir / RECORD).read_text())
    assert record['step'] <= 3 and record['layer'].startswith('backbone.')
    # Those that were saved are all broken.
    assert record['checkpoint'] is None and list(work_dir.glob('epoch_*.pth'))
    assert not list(work_dir.glob('epoch_7.pth' if patience is None else 'epoch_[3-7].pth'))


def diverge(rank, folder):
    """A loop whose loss is bad in the second process alone; what it ends with."""
    runner = SimpleNamespace(
        model=nn.Sequential(nn.LayerNorm(2)), work_dir=folder, iter=0, max_iters=99, hooks=[],
        message_hub=MessageHub('hub'), optim_wrapper=None, logger=SimpleNamespace(error=print))
    hook = DivergenceHook(patience=2, interval=5)
    hook.before_train(runner)
    try:
        for runner.iter in range(20):
            runner.model(torch.ones(1, 2))
            if runner.iter == 3:
                checkpoint = folder / 'iter_3.pth'
                if rank == 0:
                    checkpoint.touch()
                runner.message_hub.update_info('last_ckpt', str(checkpoint))
            bad = rank == 1 and runner.iter >= 6
            hook.after_train_iter(runner, 0, outputs=dict(loss=torch.tensor(float('nan') if bad else 1.0)))
    except DivergenceError as error:
        return f'stopped at {runner.iter} {error}'


@pytest.mark.slow
def test_all_processes_stop_at_the_same_step(tmp_path):
    """Also those whose own loss is fine: they would wait for the others for ever."""
    ended = processes.run(diverge, tmp_path)
    assert 'stopped at 9 the run diverged at step 7' in ended[0] and LAST_GOOD in ended[0]
    assert ended[1] == ended[0]  # though the first process alone looks at files
    assert json.loads((tmp_path / RECORD).read_text())['step'] == 7
