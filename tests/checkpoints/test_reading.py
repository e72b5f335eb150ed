"""A checkpoint of somebody else runs no code, and those of OpenMMLab and timm load."""
import argparse
import io
import os
import pickle
import tarfile

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader

from mmunorm.checkpoints.loading import read_checkpoint
from mmunorm.checkpoints.reading import reading
from mmunorm.utils import PreflightError

takes_lists = pytest.mark.skipif(not hasattr(torch.serialization, 'add_safe_globals'),
                                 reason='before torch 2.4, --trust-checkpoint loads training checkpoints')


class Opens:
    """Its unpickling makes an empty file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), 'w')


class Asks:
    """Its unpickling asks for an attribute."""

    def __init__(self, *question):
        self.question = question

    def __reduce__(self):
        return getattr, self.question


def refusal(path):
    with pytest.raises(PreflightError) as error:
        read_checkpoint(str(path))
    message = str(error.value)
    assert str(path) in message and '--trust-checkpoint' in message and '\n' not in message
    return message


@pytest.mark.parametrize('key', ['state_dict', 'meta'])
def test_code_is_refused(tmp_path, key):
    """By us, and within a tool by mmengine's own loader, which would load anything at its second attempt."""
    path, marker = tmp_path / 'a.pth', tmp_path / 'marker'
    for how in (dict(), dict(_use_new_zipfile_serialization=False)):
        torch.save({'state_dict': dict(weight=torch.ones(2)), key: dict(a=Opens(marker))}, path, **how)
        refusal(path)
        with reading(), pytest.raises(pickle.UnpicklingError):
            CheckpointLoader.load_checkpoint(str(path))
        assert not marker.exists()


def test_no_other_way_around(tmp_path):
    """A plain pickle, a tar file as torch wrote it ten years ago, and a program of TorchScript."""
    marker = tmp_path / 'marker'
    (tmp_path / 'plain.pth').write_bytes(pickle.dumps(Opens(marker)))
    with tarfile.open(tmp_path / 'tar.pth', 'w') as archive:
        for name in ('sys_info', 'pickle', 'storages', 'tensors'):
            content = pickle.dumps(Opens(marker), protocol=2)
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / 'script.pth')
    for name in ('plain', 'tar', 'script'):
        with pytest.raises(PreflightError):
            read_checkpoint(str(tmp_path / f'{name}.pth'))
    assert not marker.exists()


def test_only_a_log_asks_for_its_functions(tmp_path):
    path = tmp_path / 'a.pth'
    for question in ((HistoryBuffer, '__init__'), (torch.Tensor, 'mean'), (np.ndarray, 'tofile'),
                     (HistoryBuffer, 'register_statistics')):
        torch.save(dict(state_dict={}, message_hub=Asks(*question)), path)
        refusal(path)


def logs():
    buffer = HistoryBuffer([1.0, 2.0, 3.0], [1, 1, 1])
    buffer.update(np.float64(4))
    return dict(log_scalars={'train/loss': buffer}, runtime_info=dict(iter=3, metric=np.float32(0.5)), resumed_keys={})


@takes_lists
@pytest.mark.parametrize('how', [dict(), dict(_use_new_zipfile_serialization=False)])
def test_a_checkpoint_of_mmengine(tmp_path, how):
    """With timm's `args`; read by us, and within a tool by mmengine's own loader."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    content = dict(
        meta=dict(epoch=1, iter=3, cfg='a = 1', seed=0, time='20260101', dataset_meta=dict(classes=('a', 'b')),
                  palette=np.arange(6, dtype=np.uint8).reshape(2, 3)),
        state_dict=model.state_dict(), message_hub=logs(), optimizer=optimizer.state_dict(),
        param_schedulers=[dict(last_step=3, gamma=0.1)], args=argparse.Namespace(lr=1e-3))
    path = str(tmp_path / 'epoch_1.pth')
    torch.save(content, path, **how)
    with reading():
        by_mmengine = CheckpointLoader.load_checkpoint(path, map_location='cpu')
    for read in (read_checkpoint(path), by_mmengine):
        assert torch.equal(read['state_dict']['weight'], model.weight)
        assert read['message_hub']['log_scalars']['train/loss'].mean() == 2.5
        assert read['message_hub']['log_scalars']['train/loss'].statistics('max') == 4
        assert read['meta']['palette'].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert read['message_hub']['runtime_info']['metric'] == 0.5 and read['args'].lr == 1e-3


@takes_lists
@pytest.mark.parametrize('core', ['numpy.core', 'numpy._core'])
def test_arrays_of_every_numpy(core, tmp_path):
    path = tmp_path / 'a.pth'
    torch.save(dict(state_dict={}, a=np.arange(3.0), b=np.float32(2)), path, _use_new_zipfile_serialization=False)
    own = np.zeros(0).__reduce__()[0].__module__.removesuffix('.multiarray')
    path.write_bytes(path.read_bytes().replace(own.encode(), core.encode()))
    read = read_checkpoint(str(path))
    assert read['a'].tolist() == [0, 1, 2] and read['b'] == 2


def test_trust(tmp_path):
    path, marker, before = tmp_path / 'a.pth', tmp_path / 'marker', dict(os.environ)
    torch.save(dict(state_dict={}, meta=Opens(marker)), path)
    with reading(trusted=True):
        read_checkpoint(str(path))
        assert marker.exists()
        marker.unlink()
        CheckpointLoader.load_checkpoint(str(path))
        assert marker.exists()
        with reading():
            refusal(path)
    refusal(path)
    assert dict(os.environ) == before


def test_a_damaged_file_is_one_line(tmp_path):
    path = tmp_path / 'a.pth'
    torch.save(dict(state_dict=dict(a=torch.ones(1000))), path)
    for content in (path.read_bytes()[:2000], b'', b'no checkpoint'):
        path.write_bytes(content)
        with pytest.raises(PreflightError, match='cannot read the checkpoint') as error:
            read_checkpoint(str(path))
        assert 'trust' not in str(error.value)
