import os

import pytest
import torch

import mmunorm  # noqa: F401, before anything imports mmcv.ops

# isort: split
from mmengine.registry import DefaultScope


@pytest.fixture(scope='session', autouse=True)
def _threads():
    """Parallel test processes would fight over the cores."""
    if 'PYTEST_XDIST_WORKER' in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_default_scope():
    """What a Runner of an earlier test has set would decide where registries look."""
    DefaultScope._instance_dict.clear()
