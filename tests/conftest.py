import gc
import os
from collections import Counter

import pytest
import torch

import mmunorm  # noqa: F401, before anything imports mmcv.ops

# isort: split
from mmengine.registry import DefaultScope

from . import tiny_runs

gc.freeze()  # each data set collects garbage, and half a million objects of libraries are none


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
def _no_pause():
    tiny_runs.skip_pauses()


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch):
    """The tools are run from a folder other than the repository's."""
    monkeypatch.chdir(tmp_path)
    tiny_runs.skip_config_formatting(monkeypatch)


@pytest.fixture(scope='module')
def classifier(tmp_path_factory):
    """Config, weights and data folder of a small classifier that was never trained."""
    return tiny_runs.untrained_classifier(tmp_path_factory.mktemp('classifier'))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_default_scope():
    """What a Runner of an earlier test has set would decide where registries look."""
    DefaultScope._instance_dict.clear()
