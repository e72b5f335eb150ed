"""The wheel, as `pip install` unpacks it, without the repository, also in mmpretrain's own `train.py` and `test.py`."""
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import mmpretrain
import pytest
import torch

import mmunorm.__main__

from . import processes, tiny_runs

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def installed(tmp_path_factory):
    """The folder of a wheel's content."""
    folder = tmp_path_factory.mktemp('wheel')
    source = folder / 'source'  # the build writes into its source folder
    source.mkdir()
    files = subprocess.run(['git', 'ls-files', '-co', '--exclude-standard'], cwd=tiny_runs.ROOT, capture_output=True,
                           text=True, check=True).stdout
    subprocess.run(['tar', 'cf', folder / 'source.tar', '-T', '-'], input=files, cwd=tiny_runs.ROOT, text=True,
                   check=True)
    subprocess.run(['tar', 'xf', folder / 'source.tar'], cwd=source, check=True)
    subprocess.run([sys.executable, '-m', 'pip', 'wheel', '--quiet', '--no-deps', '--no-build-isolation', '-w', folder,
                    source], check=True)
    wheel, = folder.glob('*.whl')
    zipfile.ZipFile(wheel).extractall(folder / 'site')
    return folder / 'site'


def test_it_requires_nothing_of_openmmlab(installed):
    metadata, = installed.glob('mmunorm-*.dist-info/METADATA')
    required = [line for line in metadata.read_text().splitlines() if line.startswith('Requires-Dist') and
                'extra' not in line]
    assert [re.match(r'Requires-Dist: (\w+)', line)[1] for line in required] == ['torch', 'numpy', 'tqdm']


def test_its_tools_are_listed(installed, monkeypatch, capsys):
    monkeypatch.setattr(mmunorm.__main__, 'TOOLS', installed / 'mmunorm/.mim/tools')
    for argv, error in (([], None), (['--help'], None), (['trian'], 'there is no tool trian')):
        with pytest.raises(SystemExit) as stop:
            mmunorm.__main__.main(argv)
        listed = {line.strip() for line in capsys.readouterr().out.splitlines()}
        assert stop.value.code == error and 'demo' not in listed
        assert {'train', 'test', 'infer', 'dist_train', 'analysis/fuse_and_benchmark'} <= listed
        assert 'ship_report' not in listed


def test_ship_has_its_report(installed, monkeypatch, capsys):
    monkeypatch.setattr(mmunorm.__main__, 'TOOLS', installed / 'mmunorm/.mim/tools')
    monkeypatch.setattr(sys, 'path', [*sys.path])
    monkeypatch.delitem(sys.modules, 'ship_report', raising=False)
    with pytest.raises(SystemExit, match='^0$'):
        mmunorm.__main__.main(['ship', '--help'])
    report = Path(sys.modules['ship_report'].__file__)
    assert report.is_relative_to(installed) and report.with_name('ship.html.jinja').exists()


CONFIG = """
_base_ = ['{base}']
custom_imports = dict(imports=['mmunorm'])
custom_hooks = [dict(type='OfflineNormHook')]
train_cfg = dict(max_epochs=2, val_interval=1)
"""
RUN = """
import runpy, sys
sys.argv = [*{stock!r}]
runpy.run_path(sys.argv[0], run_name='__main__')
from mmunorm.__main__ import main
main({own!r})
"""


def test_mmpretrains_own_tools_train_and_resume_and_its_tools_test(installed, tmp_path):
    """With the lines of README in a config. mmdet's train.py runs in test_readme.py; its test.py imports mmcv's
    operators before it reads the config."""
    tools = Path(mmpretrain.__file__).parent / '.mim/tools'
    base, config, own = tiny_runs.write_classifier(tmp_path), tmp_path / 'config.py', tmp_path / 'own.py'
    config.write_text(CONFIG.format(base=base))
    own.write_text(base.read_text().replace(f'{tiny_runs.ROOT}/configs', 'mmunorm::configs'))
    work_dir = tmp_path / 'w'
    # The stock tools ask for workers that persist.
    options = ['--work-dir', str(work_dir), '--cfg-options', *(
        f'{split}_dataloader.persistent_workers=False' for split in ('train', 'val', 'test'))]
    # In a process that has imported nothing: the config brings mmunorm.
    code = RUN.format(stock=[str(tools / 'train.py'), str(config), *options],
                      own=['test', str(own), str(work_dir / 'epoch_2.pth'), '--work-dir', str(tmp_path / 'tested')])
    done = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, capture_output=True, text=True,
                          env=dict(PYTHONPATH=str(installed), PATH='/usr/bin:/bin', OMP_NUM_THREADS='1'))
    assert done.returncode == 0, done.stderr
    log = next(work_dir.glob('*/*.log')).read_text()
    assert 'OfflineNormHook' in log and 'never leaves its warm-up' not in log
    last, first = sorted(work_dir.glob('*.pth'), reverse=True)
    steps = tiny_runs.checkpoint(last)['state_dict']['backbone.norm1.num_batches_tracked']
    tested, = (tmp_path / 'tested').glob('*/*.json')
    assert 'accuracy/top1' in tested.read_text()

    last.unlink()
    (work_dir / 'last_checkpoint').write_text(str(first))
    assert processes.run_tool(tools / 'train.py', config, '--resume', *options) == [0]
    assert tiny_runs.checkpoint(last)['state_dict']['backbone.norm1.num_batches_tracked'] == steps
    assert processes.run_tool(tools / 'test.py', config, last, *options) == [0]
    metrics = max(work_dir.glob('*/*.json'), key=lambda path: path.stat().st_mtime).read_text()
    assert 'accuracy/top1' in metrics


def test_an_old_torch_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(torch, '__version__', '2.0.1+cu117')
    with pytest.raises(ImportError, match=r'^mmunorm needs torch 2.1 or newer, and this Python has 2\.0\.1\+cu117\.$'):
        runpy.run_path(mmunorm.__file__)
