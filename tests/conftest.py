import os

import pytest
import torch

import mmunorm  # noqa: F401, before anything imports mmcv.ops


@pytest.fixture(scope='session', autouse=True)
def _threads():
    """Parallel test processes would fight over the cores."""
    if 'PYTEST_XDIST_WORKER' in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
