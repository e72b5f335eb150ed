"""Runners in separate processes."""
import os
import signal
import time
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from mmunorm.benchmark.workers import Worker
from mmunorm.deploy import ExportedModel
from mmunorm.deploy.formats import FORMATS
from mmunorm.deploy.formats.pytorch import Torch
from mmunorm.utils import PreflightError

from .. import processes

META = dict(task='classifier', classes=['a', 'b'], shape=[2, 3, 4, 4], outputs=['scores'])


class Sum(nn.Module):
    """Returns its number of threads, and ends its process at an image of -1."""

    def forward(self, images):
        if images.min() == -2:
            raise MemoryError('too large')
        if images.min() == -1:
            os._exit(3)
        if images.min() == -4:
            return torch.full((len(images), 1), os.getpid(), dtype=torch.float64)
        return torch.stack([images.sum((1, 2, 3)), torch.full((len(images), ), float(torch.get_num_threads()))], 1)


@pytest.fixture(autouse=True, scope='module')
def _server():
    processes.start()


@pytest.fixture
def pickled(tmp_path):
    inputs = torch.ones(2, 3, 4, 4)
    torch.save((Sum(), META, (inputs, )), tmp_path / 'torch.pth')
    return tmp_path / 'torch.pth', inputs.numpy()


def test_a_worker_is_the_runner(pickled):
    path, images = pickled
    worker = Worker(partial(Torch().open, path, 1))
    try:
        model = ExportedModel(worker)
        assert model.meta == META and model.classes == ['a', 'b']
        np.testing.assert_array_equal(model(np.concatenate([images] * 2)[:3])['scores'], [[48, 1]] * 3)
        assert 0 < worker.seconds(images) < 60
        with pytest.raises(MemoryError, match='too large'):
            model(images - 3)
        assert model(images)['scores'][0, 0] == 48  # it continues
        with pytest.raises(PreflightError, match='has ended'):
            model(images - 2)
    finally:
        worker.close()


def test_ctrl_c_does_not_end_a_worker(pickled):
    """A terminal sends it to all processes; the tool prints a line and closes its workers."""
    path, images = pickled
    worker = Worker(partial(Torch().open, path, 1))
    try:
        model = ExportedModel(worker)
        process = int(model(images - 5)['scores'][0, 0])
        for _ in range(2):
            time.sleep(0.5)  # until it waits, also on a busy machine
            os.kill(process, signal.SIGINT)
            assert model(images)['scores'][0, 0] == 48
    finally:
        worker.close()


def test_files_that_do_not_open(tmp_path):
    with pytest.raises(PreflightError, match='there is no exported model'):
        Worker(partial(FORMATS['onnx'].open, tmp_path / 'none.onnx'))


def test_compiled(pickled, monkeypatch):
    path, images = pickled
    compiled = []
    monkeypatch.setattr(torch, 'compile', lambda graph: compiled.append(graph) or graph)  # takes half a minute
    session = Torch().open(path, 1, compiled=True)
    assert len(compiled) == 1 and session.run([images])[0][0, 0] == 48

    def fails(images):
        raise torch._dynamo.exc.TorchDynamoException('no compiler')

    monkeypatch.setattr(torch, 'compile', lambda graph: fails)
    with pytest.raises(PreflightError, match='^torch.compile: .*no compiler'):
        Torch().open(path, 1, compiled=True)
