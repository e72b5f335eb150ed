import fcntl
import json
import os
import re
import time
from pathlib import Path

import pytest
import torch
from mmengine.config import Config

from mmunorm.cli.arguments import load_config
from mmunorm.comparison import processes
from mmunorm.config.checkpoints import pretrained_path

from .. import tiny_runs

COMPARE = tiny_runs.load_tool('analysis/compare_norms')

@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch, impatient):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def config(tmp_path):
    return tiny_runs.write_classifier(tmp_path)


def compare(config, *arguments, status=0):
    if status:
        with pytest.raises(SystemExit) as stop:
            tiny_runs.call(COMPARE, config, '--out', 'out', *arguments)
        assert stop.value.code == status
    else:
        tiny_runs.call(COMPARE, config, '--out', 'out', *arguments)


def table(name='comparison'):
    return [line for line in read(f'{name}.md').splitlines() if line.startswith('|')]


def read(name):
    return Path('out', name).read_text()


def run_config(run):
    return Config.fromfile(f'out/{run}.py')


@pytest.mark.slow
def test_every_norm_and_seed_is_trained_once(config, fake, capsys):
    fake('un', 'diverges')
    compare(config, '--norms', 'LN', 'UN', '--seeds', 2, '--jobs', 3)
    assert sorted(fake.calls()) == [f'out/{norm}/seed_{seed}' for norm in ('ln', 'un') for seed in (0, 1)]
    assert table()[2:] == ['| LN | 50.00 ± 0.00 | 50.00 | 50.00 |',
                           '| UN | FAIL | FAIL at step 7 | FAIL at step 7 |']
    assert '50.00 ± 0.00' in capsys.readouterr().out
    # Nothing is left to do; more seeds and norms may join.
    compare(config, '--norms', 'LN', 'UN', '--seeds', 2)
    assert fake.calls() == []
    compare(config, '--norms', 'LN', 'UN-nofilter', '--seeds', 3)
    assert sorted(fake.calls()) == ['out/ln/seed_2', *(f'out/un-nofilter/seed_{seed}' for seed in range(3))]


@pytest.mark.slow
def test_what_a_run_is_given(config, fake):
    compare(config, '--norms', 'LN', 'UN', 'own=UN,window=8', '--seeds', 2, '--fail-patience', 4,
            '--cfg-options', 'train_cfg.max_epochs=2')
    base = Config.fromfile(config).to_dict()
    for norm, norm_cfg in (('ln', dict(type='LN')), ('un', dict(type='UN', warmup_iters=1)),
                           ('own', dict(type='UN', warmup_iters=1, window=8))):
        cfg = run_config(f'{norm}/seed_1').to_dict()
        assert cfg['model']['backbone'].pop('norm_cfg') == norm_cfg
        assert cfg.pop('custom_hooks') == [dict(type='DivergenceHook', patience=4, factor=3.0)]
        assert cfg['randomness']['seed'] == 1 and cfg['train_cfg']['max_epochs'] == 2
        # All else is the recipe.
        assert {key for key in base if base[key] != cfg[key]} == {'model', 'randomness', 'train_cfg'}


@pytest.mark.slow
def test_stress(config, fake):
    compare(config, '--norms', 'LN', '--seeds', 1, '--stress', '--stress-lr', 5, '--stress-scale', 3, 4,
            '--stress-probability', 0.5)
    assert fake.calls() == ['out/ln/seed_0', 'stressed/ln/seed_0']
    calm, stressed = run_config('ln/seed_0'), run_config('stressed/ln/seed_0')
    assert stressed.optim_wrapper.optimizer.lr == pytest.approx(5 * calm.optim_wrapper.optimizer.lr)
    assert stressed.custom_hooks == [*calm.custom_hooks, dict(
        type='InputStressHook', probability=0.5, scale=(3.0, 4.0), seed=0)]
    assert table('stress')[2] == '| LN | 50.00 | 50.00 | 50.00 | 50.00 |'
    text = read('stress.md')
    # The table of more norms that may lie there is left alone.
    assert not os.path.exists('out/comparison.md')
    assert 'learning rate times 5; with probability 0.5' in text and 'between those of 3 and 4' in text


@pytest.mark.slow
def test_a_crash_is_an_error_and_the_others_go_on(config, fake, capsys):
    fake('ln', 'crashes')
    compare(config, '--norms', 'LN', 'UN', '--seeds', 1, status=3)
    assert fake.calls() == ['out/ln/seed_0', 'out/un/seed_0']
    text = read('comparison.md')
    assert '- error in LN seed 0: tools/train.py ended with status 1; see out/ln/seed_0/output.log' in text
    assert 'FAIL at' not in text and '| UN | 50.00 | 50.00 |' in text
    assert 'Boom' in read('ln/seed_0/output.log')
    assert '1 of 2 runs are not finished' in capsys.readouterr().err
    fake('ln', 'finishes')
    compare(config, '--norms', 'LN', 'UN', '--seeds', 1)
    assert fake.calls() == ['out/ln/seed_0']
    assert '| LN | 50.00 | 50.00 |' in table()


@pytest.mark.slow
def test_interruption_ends_the_runs_and_the_same_command_goes_on(config, fake, monkeypatch, capsys):
    fake('un', 'sleeps')
    started, polls = [], []

    class Process(processes.Process):

        def __init__(self, *arguments):
            super().__init__(*arguments)
            started.append(self.popen)

    def interrupt(seconds):
        polls.append(seconds)
        time.sleep(0.02)
        if len(started) == 2 and os.path.exists('calls') and Path('calls').read_text().count('\n') == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(processes, 'Process', Process)
    monkeypatch.setattr(processes, 'time', type('time', (), dict(sleep=staticmethod(interrupt))))
    compare(config, '--norms', 'LN', 'UN', '--seeds', 1, status=3)
    assert 'the same command goes on' in capsys.readouterr().err
    assert all(process.poll() is not None for process in started)
    assert 'Not finished yet (1 of 2): UN seed 0' in read('comparison.md')

    fake('un', 'finishes')
    fake.calls()
    compare(config, '--norms', 'LN', 'UN', '--seeds', 1)
    assert fake.calls() == ['out/un/seed_0']


@pytest.mark.slow
def test_other_settings_in_the_same_folder_are_an_error(config, fake, capsys):
    compare(config, '--norms', 'LN', '--seeds', 1)
    fake.calls()
    compare(config, '--norms', 'LN', 'UN', '--seeds', 1, '--cfg-options',
            'optim_wrapper.optimizer.lr=0.5', status=2)
    printed = capsys.readouterr().err
    assert 'out/ln/seed_0 was trained with other settings (optim_wrapper.optimizer.lr)' in printed
    assert 'another --out' in printed
    assert fake.calls() == [] and not os.path.exists('out/un')
    with open('out/ln/seed_0.py', 'a') as file:  # a folder of somebody else's
        file.write("open('marker', 'w')\n")
    compare(config, '--norms', 'LN', '--seeds', 1, status=2)
    assert 'cannot compare out/ln/seed_0.py' in capsys.readouterr().err and not os.path.exists('marker')


def test_a_run_that_another_process_trains_is_left_alone(config, fake):
    os.makedirs('out/ln/seed_0')
    with open('out/ln/seed_0/lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compare(config, '--norms', 'LN', 'UN', '--seeds', 1, status=3)
    assert fake.calls() == ['out/un/seed_0']
    assert 'another process is training it' in read('comparison.md')


@pytest.mark.slow
def test_pretrained_weights_of_each_norm_and_seed(config, fake, tmp_path, capsys):
    compare(config, '--norms', 'LN', '--seeds', 1, '--pretrained', 'none/{norm}.pth', status=2)
    assert 'no backbone weights none/ln.pth' in capsys.readouterr().err
    (tmp_path / 'ln_0.pth').touch()
    compare(config, '--norms', 'LN', 'PN=UN', '--seeds', 1, '--pretrained', '{norm}_{seed}.pth', status=3)
    assert fake.calls() == ['out/ln/seed_0']
    init_cfg = dict(type='Pretrained', checkpoint='ln_0.pth', prefix='backbone.')
    assert run_config('ln/seed_0').model.backbone.init_cfg == init_cfg
    assert 'error in PN seed 0: there are no backbone weights pn_0.pth' in read('comparison.md')


@pytest.mark.slow
def test_pretrained_weights_of_a_recipe_that_names_its_own(config, fake, tmp_path):
    """In a variable, as the detectors' configs do: what the run reads is its own weights all the same."""
    config.write_text(config.read_text() + "pretrained = 'theirs.pth'\nmodel['backbone']['init_cfg'] = dict("
                      "type='Pretrained', checkpoint=pretrained, prefix='backbone.')\n")
    (tmp_path / 'ln_0.pth').touch()
    compare(config, '--norms', 'LN', '--seeds', 1, '--pretrained', '{norm}_{seed}.pth')
    compare(config, '--norms', 'UN', '--seeds', 1)
    for norm, path in (('ln', 'ln_0.pth'), ('un', None)):
        assert pretrained_path(load_config(f'out/{norm}/seed_0.py')) == path


@pytest.mark.slow
@pytest.mark.parametrize(('options', 'centered'), [
    (['--pretrained', '{norm}_{seed}.pth'], 'frozen'),
    (['--pretrained', '{norm}_{seed}.pth', '--cfg-options', 'model.backbone.norm_cfg.centered=True'], True)])
def test_un_plus_keeps_the_means_of_pretrained_weights(options, centered, config, fake, tmp_path):
    torch.save({'backbone.norm1.running_mean': torch.ones(2)}, tmp_path / 'un_plus_0.pth')
    compare(config, '--norms', 'UN+', '--seeds', 1, *options)
    assert run_config('un_plus/seed_0').model.backbone.norm_cfg.centered == centered


@pytest.mark.slow
def test_options_are_of_the_recipe(config, fake):
    """So other norms do not get UN's settings, and stress still raises the rate."""
    compare(config, '--norms', 'LN', 'UN', '--seeds', 1, '--stress', '--stress-lr', 5, '--cfg-options',
            'model.backbone.norm_cfg.window=8', 'optim_wrapper.optimizer.lr=0.25')
    assert run_config('ln/seed_0').model.backbone.norm_cfg == dict(type='LN')
    assert run_config('un/seed_0').model.backbone.norm_cfg.window == 8
    assert run_config('un/seed_0').optim_wrapper.optimizer.lr == 0.25
    assert run_config('stressed/un/seed_0').optim_wrapper.optimizer.lr == 1.25


@pytest.mark.slow
def test_weights_that_the_runs_would_not_get_are_refused(config, fake, capsys):
    for options, message in ((['pretrained=a.pth'], '--cfg-options pretrained is not for a comparison'),
                             (['model.backbone.init_cfg.checkpoint=a.pth'], '--cfg-options model.backbone'),
                             (['load_from=a.pth'], "load_from='a.pth', which these runs would not load")):
        compare(config, '--norms', 'LN', '--cfg-options', *options, status=2)
        error, = capsys.readouterr().err.splitlines()
        assert message in error and '--pretrained' in error
    assert fake.calls() == [] and not os.path.exists('out')
    compare(config, '--norms', 'LN', '--seeds', 1, '--cfg-options', 'pretrained=None')
    assert fake.calls() == ['out/ln/seed_0']


@pytest.mark.parametrize(('recipe', 'reads'), [('translation/debian_en_it_un.py', 'a TranslationModel reads token ids'),
                                               ('digits/iat_un_enhancer.py', 'an ImageEnhancer reads pictures whose')])
def test_what_cannot_be_stressed_is_refused_before_the_runs(recipe, reads, fake, capsys):
    compare(tiny_runs.ROOT / 'configs' / recipe, '--norms', 'LN', '--stress', status=2)
    error, = capsys.readouterr().err.splitlines()
    assert '--stress multiplies normalized pictures' in error and re.search(reads, error)
    assert fake.calls() == [] and not os.path.exists('out')


@pytest.mark.parametrize(('arguments', 'text'), [
    (['--norms', 'XN'], "no norm 'XN'"), (['--norms', 'a=XN'], "'XN'"), (['--norms', 'LN', 'LN'], 'twice'),
    (['--norms', 'a=UN,size=3'], 'size'), (['--norms', 'LN', '--seeds', '0'], '--seeds: must be at least 1'),
    (['--norms', 'LN', '--fail-factor', '0.5'], 'factor must be more than 1'),
    (['--norms', 'LN', '--stress', '--stress-probability', '2'], '--stress-probability'),
    (['--norms', 'LN', '--pretrained', 'a/{nrm}.pth'], '{norm} and {seed}'),
    (['--norms', 'LN', '--pretrained', 'a/{.pth'], '{norm} and {seed}'),
    (['--norms', 'LN', '--cfg-options', 'train_dataloader.dataset.data_root=gone'], 'gone')])
def test_what_is_refused(config, fake, arguments, text, capsys):
    compare(config, *arguments, status=2)
    assert text in capsys.readouterr().err
    assert fake.calls() == [] and not os.path.exists('out')


@pytest.mark.slow
def test_real_runs_one_of_them_killed_and_resumed(config, tmp_path, monkeypatch):
    real = processes.TRAIN
    (tmp_path / 'killed.py').write_text(
        'import os, runpy\n'
        'from mmengine.hooks import CheckpointHook\n'
        'save = CheckpointHook._save_checkpoint\n'
        'CheckpointHook._save_checkpoint = lambda *args: (save(*args), os._exit(9))\n'
        f'runpy.run_path({str(real)!r}, run_name="__main__")\n')
    options = ['--norms', 'UN', '--seeds', 1, '--cfg-options', 'train_cfg.max_epochs=2',
               'default_hooks.logger.interval=1', 'optim_wrapper.optimizer.lr=1e-3']
    monkeypatch.setattr(processes, 'TRAIN', tmp_path / 'killed.py')
    compare(config, *options, status=3)
    assert os.path.exists('out/un/seed_0/epoch_1.pth') and not os.path.exists('out/un/seed_0/epoch_2.pth')

    monkeypatch.setattr(processes, 'TRAIN', real)
    compare(config, *options)
    log = read('un/seed_0/output.log')
    assert 'resumed epoch: 1' in log
    result = json.loads(read('un/seed_0/result.json'))
    assert result['status'] == 'finished' and result['step'] == 4
    accuracy = f'{result["metrics"]["accuracy/top1"]:.2f}'
    assert table()[2] == f'| UN | {accuracy} | {accuracy} |'
