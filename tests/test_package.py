"""The wheel, as `pip install` unpacks it, without the repository."""
import re
import subprocess
import sys
import zipfile

import pytest

import mmunorm.__main__

from . import tiny_runs

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


def test_a_config_on_one_of_its_own_trains(installed, tmp_path):
    config = tiny_runs.write_classifier(tmp_path)
    config.write_text(config.read_text().replace(f'{tiny_runs.ROOT}/configs', 'mmunorm::configs'))
    code = """
from mmunorm import __main__
__main__.main()
"""
    done = subprocess.run([sys.executable, '-c', code, 'train', config, '--work-dir', 'w'],
                          cwd=tmp_path, capture_output=True, text=True,
                          env=dict(PYTHONPATH=str(installed), PATH='/usr/bin:/bin', OMP_NUM_THREADS='1'))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / 'w/epoch_1.pth').is_file()


def test_an_old_torch_is_one_clear_line():
    code = "import torch; torch.__version__ = '2.0.1+cu117'; import mmunorm"
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        'ImportError: mmunorm needs torch 2.1 or newer, and this Python has 2.0.1+cu117.')
