import gc
import os
import shutil
from collections import Counter

import pytest
import torch
from filelock import FileLock

import mmunorm  # noqa: F401, before anything imports mmcv.ops

# isort: split
from mmengine.registry import DefaultScope

from tests import tiny_runs


def pytest_collection_finish():
    """Each data set and each fold collects garbage, and half a million objects of libraries are not."""
    gc.freeze()


def pytest_collection_modifyitems(items):
    """Files with many slow tests come first, or one process would still run them when the others are done."""
    slow = Counter(item.path for item in items if item.get_closest_marker('slow'))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope='session', autouse=True)
def _threads():
    """Parallel test processes would fight over the cores."""
    if 'PYTEST_XDIST_WORKER' in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(scope='session', autouse=True)
def _what_is_slow():
    tiny_runs.skip_what_is_slow()


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch):
    """The tools are run from a folder other than the repository's."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope='session')
def trained(tmp_path_factory):
    """A folder with the tiny classifier's config, its checkpoint of an epoch, and its twin with LayerNorm.

    One process makes it for all; nothing may be changed in it.
    """
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if 'PYTEST_XDIST_WORKER' in os.environ else folder) / 'trained'
    with FileLock(f'{folder}.lock'):
        if not (folder / 'w/last_checkpoint').exists():
            shutil.rmtree(folder, ignore_errors=True)  # half of one
            config = tiny_runs.write_classifier(folder)
            tiny_runs.ln_twin(config)
            tiny_runs.call(tiny_runs.load_tool('train'), config, '--work-dir', folder / 'w')
    return folder


@pytest.fixture(scope='session')
def classifier(trained):
    """Config, checkpoint and data folder of the tiny classifier."""
    return trained / 'classifier.py', trained / 'w/epoch_1.pth', trained / 'data'


@pytest.fixture(scope='session')
def ln_classifier(trained):
    """Config and untrained weights of its twin with LayerNorm."""
    return trained / 'swin_ln_tiny.py', trained / 'ln.pth'


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_default_scope():
    """What a Runner of an earlier test has set would decide where registries look."""
    DefaultScope._instance_dict.clear()


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs a tool and gives what it prints, or the one line of an error."""
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments):
        try:
            tiny_runs.call(tiny_runs.load_tool(name), *arguments)
        except SystemExit as stop:
            assert stop.code in (2, 3)
            error = capsys.readouterr().err.strip().splitlines()[-1]
            assert error.startswith('error: ')
            return error
        return capsys.readouterr().out

    return run
