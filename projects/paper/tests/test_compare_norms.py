import fcntl
import json
import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from mmengine.config import Config

from mmunorm.cli.arguments import load_config
from mmunorm.config.pretrained import pretrained_path
from projects.paper.paper import training
from tests import tiny_runs

COMPARE = tiny_runs.load_tool('paper:compare_norms')


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def config(tmp_path):
    return tiny_runs.write_classifier(tmp_path)


def compare(config, *arguments, status=0):
    with pytest.raises(SystemExit) if status else nullcontext() as stop:
        tiny_runs.call(COMPARE, config, '--out', 'out', *arguments)
    assert not status or stop.value.code == status


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
    printed = capsys.readouterr()
    assert '50.00 ± 0.00' in printed.out and not printed.err  # the bar is for terminals
    # Nothing is left to do; more seeds and norms may join.
    compare(config, '--norms', 'LN', 'UN', '--seeds', 2)
    assert fake.calls() == []
    compare(config, '--norms', 'LN', '--seeds', 1, '--first-seed', 2)
    assert fake.calls() == ['out/ln/seed_2']
    compare(config, '--norms', 'LN', 'UN-nofilter', '--seeds', 3)
    assert sorted(fake.calls()) == [f'out/un-nofilter/seed_{seed}' for seed in range(3)]


@pytest.mark.slow
def test_the_config_of_a_run(config, fake):
    compare(config, '--norms', 'LN', 'own=UN,window=8', '--seeds', 2, '--fail-patience', 4, '--stress', '--stress-lr',
            5, '--stress-scale', 3, 4, '--stress-probability', 0.5, '--cfg-options',
            'train_cfg.max_epochs=2', 'model.backbone.norm_cfg.alpha=0.5', 'optim_wrapper.optimizer.lr=0.25')
    assert fake.calls()[3:5] == ['out/own/seed_1', 'stressed/ln/seed_0']
    base = Config.fromfile(config).to_dict()
    base['optim_wrapper']['optimizer']['lr'] = 0.25
    for norm, norm_cfg in (('ln', dict(type='LN')), ('own', dict(type='UN', warmup_iters=1, alpha=0.5, window=8))):
        cfg, stressed = (run_config(f'{folder}{norm}/seed_1').to_dict() for folder in ('', 'stressed/'))
        assert cfg['model']['backbone']['norm_cfg'] == norm_cfg
        assert cfg['custom_hooks'] == [dict(type='DivergenceHook', patience=4, factor=3.0)]
        assert cfg['randomness']['seed'] == 1 and cfg['train_cfg']['max_epochs'] == 2
        # The rest is the recipe.
        assert {key for key in base if base[key] != cfg[key]} == {
            'model', 'randomness', 'train_cfg', 'custom_imports'}
        assert cfg['custom_imports']['imports'] == ['mmunorm', 'projects.paper.paper']
        assert stressed['optim_wrapper']['optimizer'].pop('lr') == 1.25
        assert stressed.pop('custom_hooks') == [*cfg.pop('custom_hooks'), dict(
            type='InputStressHook', probability=0.5, scale=(3.0, 4.0), seed=1)]
        assert cfg['optim_wrapper']['optimizer'].pop('lr') == 0.25 and stressed == cfg
    assert table('stress')[2] == '| LN | 50.00 ± 0.00 | 50.00 | 50.00 | 50.00 ± 0.00 | 50.00 | 50.00 |'
    text = read('stress.md')
    # An existing table of more norms does not change.
    assert not os.path.exists('out/comparison.md')
    assert 'learning rate times 5; with probability 0.5' in text and 'between those of 3 and 4' in text


@pytest.mark.slow
def test_a_crash_and_a_locked_run_are_errors_and_others_continue(config, fake, capsys):
    fake('ln', 'crashes')
    os.makedirs('out/bn/seed_0')
    with open('out/bn/seed_0/lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compare(config, '--norms', 'LN', 'BN', 'UN', '--seeds', 1, status=3)
    assert fake.calls() == ['out/ln/seed_0', 'out/un/seed_0']
    text = read('comparison.md')
    assert '- error in LN seed 0: tools/train.py ended with status 1; see out/ln/seed_0/output.log' in text
    assert '- error in BN seed 0: another process is training it' in text
    assert 'FAIL at' not in text and '| UN | 50.00 | 50.00 |' in text
    assert 'Boom' in read('ln/seed_0/output.log')
    assert '2 of 3 runs are not finished' in capsys.readouterr().err
    fake('ln', 'finishes')
    compare(config, '--norms', 'LN', 'BN', 'UN', '--seeds', 1)
    assert fake.calls() == ['out/ln/seed_0', 'out/bn/seed_0']
    assert '| LN | 50.00 | 50.00 |' in table()


@pytest.mark.slow
def test_interruption_ends_the_runs_and_the_same_command_resumes(config, fake, capsys):
    fake('un', 'sleeps')

    def interrupt():
        while not os.path.exists('out/comparison.md') or Path('calls').read_text().count('\n') < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    compare(config, '--norms', 'LN', 'UN', '--seeds', 1, status=130)
    assert 'run the same command to continue' in capsys.readouterr().err
    assert 'Not finished yet (1 of 2): UN seed 0' in read('comparison.md')

    fake('un', 'finishes')
    fake.calls()
    compare(config, '--norms', 'LN', 'UN', '--seeds', 1)  # refused while the other process lives
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
    with open('out/ln/seed_0.py', 'a') as file:  # a run with other settings
        file.write("open('marker', 'w')\n")
    compare(config, '--norms', 'LN', '--seeds', 1, status=2)
    assert 'cannot compare out/ln/seed_0.py' in capsys.readouterr().err and not os.path.exists('marker')
    os.remove('out/ln/seed_0.py')
    compare(config, '--norms', 'LN', '--seeds', 1, status=2)
    assert 'out/ln/seed_0.py with its settings is missing' in capsys.readouterr().err
    Path('out/ln/seed_0/result.json').write_text('{"sta')
    compare(config, '--norms', 'LN', '--seeds', 1, status=2)
    assert 'out/ln/seed_0/result.json is damaged: remove it' in capsys.readouterr().err


@pytest.mark.slow
def test_pretrained_weights_of_each_norm_and_seed(config, fake, tmp_path):
    for name in ('un_plus_0.pth', 'ln_0.pth'):
        (tmp_path / name).touch()
    arguments = '--norms', 'LN', 'UN+', 'PN=UN', '--seeds', 1, '--pretrained', '{norm}_{seed}.pth'
    compare(config, *arguments, status=3)
    assert fake.calls() == ['out/ln/seed_0', 'out/un_plus/seed_0']
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
    compare(config, '--norms', 'BN', '--seeds', 1, '--cfg-options', 'pretrained=None')
    for norm, path in (('ln', 'ln_0.pth'), ('un', None), ('bn', None)):
        assert pretrained_path(load_config(f'out/{norm}/seed_0.py')) == path


@pytest.mark.parametrize(('recipe', 'reads'), [
    ('translation/configs/debian_en_it_un.py', 'TranslationModel reads token ids'),
    ('low_light/configs/digits/iat_un_enhancer.py', 'ImageEnhancer reads images whose')])
def test_what_cannot_be_stressed_is_refused_before_the_runs(recipe, reads, fake, capsys):
    compare(tiny_runs.ROOT / 'projects' / recipe, '--norms', 'LN', '--stress', status=2)
    error, = capsys.readouterr().err.splitlines()
    assert f'--stress multiplies normalized images by a factor, and {reads}' in error
    assert fake.calls() == [] and not os.path.exists('out')


@pytest.mark.parametrize(('arguments', 'text'), [
    (['XN'], "no norm 'XN'"), (['a=XN'], "'XN'"), (['LN', 'LN'], 'the same name'), (['a=UN,size=3'], 'size'),
    (['LN', '--seeds', '0'], '--seeds: must be at least 1'), (['LN', '--out', ''], "must be a folder, got ''"),
    (['LN', '--fail-factor', '0.5'], 'factor must be a finite number above 1'),
    (['LN', '--stress', '--stress-probability', '2'], '--stress-probability'),
    (['LN', '--pretrained', 'a/{nrm}.pth'], '{norm} and {seed}'),
    (['LN', '--pretrained', 'a/{.pth'], '{norm} and {seed}'),
    (['LN', '--pretrained', 'a/{seed.foo}.pth'], '{norm} and {seed}'),
    (['a=LN', 'a=RMSN'], 'the same name'), (['a*=LN', 'a_star=RMSN'], 'the same folder'), (['a=ReLU'], 'cannot build'),
    (['LN', '--pretrained', 'none/{norm}.pth'], 'no backbone weights none/ln.pth'),
    (['LN', '--cfg-options', 'train_dataloader.dataset.data_root=gone'], 'gone'),
    (['LN', '--cfg-options', 'pretrained=a.pth'], '--cfg-options pretrained is not for a comparison'),
    (['LN', '--cfg-options', 'model.backbone.init_cfg.checkpoint=a.pth'], '--cfg-options model.backbone'),
    (['LN', '--cfg-options', 'load_from=a.pth'], "load_from='a.pth', which these runs would not load")])
def test_errors(config, fake, arguments, text, capsys):
    compare(config, '--norms', *arguments, status=2)
    assert text in capsys.readouterr().err
    assert fake.calls() == [] and not os.path.exists('out')


@pytest.mark.slow
def test_real_runs_one_of_them_killed_and_resumed(config, tmp_path, monkeypatch):
    real = training.TRAIN
    (tmp_path / 'killed.py').write_text(
        'import os, runpy\n'
        'from mmengine.hooks import CheckpointHook\n'
        'save = CheckpointHook._save_checkpoint\n'
        'CheckpointHook._save_checkpoint = lambda *args: (save(*args), os._exit(9))\n'
        f'runpy.run_path({str(real)!r}, run_name="__main__")\n')
    options = ['--norms', 'UN', '--seeds', 1, '--cfg-options', 'train_cfg.max_epochs=2',
               'default_hooks.logger.interval=1', 'optim_wrapper.optimizer.lr=1e-3']
    monkeypatch.setattr(training, 'TRAIN', tmp_path / 'killed.py')
    compare(config, *options, status=3)
    assert os.path.exists('out/un/seed_0/epoch_1.pth') and not os.path.exists('out/un/seed_0/epoch_2.pth')

    monkeypatch.setattr(training, 'TRAIN', real)
    compare(config, *options)
    log = read('un/seed_0/output.log')
    assert 'resumed epoch: 1' in log
    result = json.loads(read('un/seed_0/result.json'))
    assert result['status'] == 'finished' and result['step'] == 4
    accuracy = f'{result["metrics"]["accuracy/top1"]:.2f}'
    assert table()[2] == f'| UN | {accuracy} | {accuracy} |'
