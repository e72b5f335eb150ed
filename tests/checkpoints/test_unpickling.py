"""A checkpoint of somebody else runs no code, and those of OpenMMLab and timm load."""
import argparse
import io
import pickle
import tarfile

import numpy as np
import pytest
import timm
import timm.utils
import torch
from mmengine.logging import HistoryBuffer

from mmunorm import compat
from mmunorm.checkpoints.loading import read_checkpoint
from mmunorm.checkpoints.unpickling import restricted
from mmunorm.utils import PreflightError


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


@pytest.fixture(params=['of this torch', 'of Python'], autouse=True)
def unpickler(request, monkeypatch):
    """Old releases of torch take no list of names: then Python's own unpickler is restricted."""
    if request.param == 'of Python':
        monkeypatch.setattr(compat, '_TAKES_NAMES', False)
    elif not compat._TAKES_NAMES:
        pytest.skip('this torch takes no list of names')


def refusal(path):
    with pytest.raises(PreflightError) as error:
        read_checkpoint(str(path))
    message = str(error.value)
    assert str(path) in message and '--trust-checkpoint' in message and '\n' not in message
    return message


@pytest.mark.parametrize('key', ['state_dict', 'meta'])
def test_code_is_refused(tmp_path, key):
    path, marker = tmp_path / 'a.pth', tmp_path / 'marker'
    for how in (dict(), dict(_use_new_zipfile_serialization=False), dict(pickle_protocol=4)):
        torch.save({'state_dict': dict(weight=torch.ones(2)), key: dict(a=Opens(marker))}, path, **how)
        with pytest.raises(PreflightError) as error:
            read_checkpoint(str(path))
        # torch's unpickler reads no other protocol, and gives another reason.
        assert '--trust-checkpoint' in str(error.value) or 'pickle_protocol' in how
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
    assert 'ScriptModule' in refusal(tmp_path / 'script.pth')
    assert 'tarfile' in refusal(tmp_path / 'tar.pth')


def test_only_a_log_asks_for_its_functions(tmp_path):
    path = tmp_path / 'a.pth'
    if hasattr(torch.serialization, 'add_safe_globals'):  # as mmengine does
        torch.serialization.add_safe_globals([getattr])
    for question in ((HistoryBuffer, '__init__'), (torch.Tensor, 'mean'), (np.ndarray, 'tofile'),
                     (HistoryBuffer, 'register_statistics')):
        torch.save(dict(state_dict={}, message_hub=Asks(*question)), path)
        assert 'getattr' in refusal(path) or torch.Tensor in question


def logs():
    buffer = HistoryBuffer([1.0, 2.0, 3.0], [1, 1, 1])
    buffer.update(np.float64(4))
    return dict(log_scalars={'train/loss': buffer}, runtime_info=dict(iter=3, metric=np.float32(0.5)), resumed_keys={})


@pytest.mark.parametrize('how', [dict(), dict(_use_new_zipfile_serialization=False)])
def test_a_checkpoint_of_mmengine(tmp_path, how):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    content = dict(
        meta=dict(epoch=1, iter=3, cfg='a = 1', seed=0, time='20260101', dataset_meta=dict(classes=('a', 'b')),
                  palette=np.arange(6, dtype=np.uint8).reshape(2, 3)),
        state_dict=model.state_dict(), message_hub=logs(), optimizer=optimizer.state_dict(),
        param_schedulers=[dict(last_step=3, gamma=0.1)])
    path = str(tmp_path / 'epoch_1.pth')
    torch.save(content, path, **how)
    read = read_checkpoint(path)
    assert torch.equal(read['state_dict']['weight'], model.weight)
    assert read['message_hub']['log_scalars']['train/loss'].mean() == 2.5
    assert read['message_hub']['log_scalars']['train/loss'].statistics('max') == 4
    assert read['meta']['palette'].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert read['message_hub']['runtime_info']['metric'] == 0.5


def test_a_checkpoint_of_timm(tmp_path):
    model = timm.create_model('vit_tiny_patch16_224', depth=1)
    saver = timm.utils.CheckpointSaver(
        model, torch.optim.AdamW(model.parameters()), args=argparse.Namespace(model='vit_tiny', lr=1e-3),
        checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path))
    saver.save_checkpoint(0, metric=12.5)
    read = read_checkpoint(str(tmp_path / 'last.pth.tar'))
    assert read['args'].model == 'vit_tiny' and read['metric'] == 12.5
    assert set(read['state_dict']) == set(model.state_dict())


def test_trust(tmp_path):
    path, marker = tmp_path / 'a.pth', tmp_path / 'marker'
    torch.save(dict(state_dict={}, meta=Opens(marker)), path)
    with restricted(), restricted(trusted=True):  # not what is called inside decides
        refusal(path)
    assert not marker.exists()
    with restricted(trusted=True):
        read_checkpoint(str(path))
    assert marker.exists()
    refusal(path)


def test_the_config_that_mmengine_would_run_is_left_out(tmp_path):
    """Its Runner counts the GPUs of an mmdet 2 run in this text."""
    path = tmp_path / 'a.pth'
    torch.save(dict(state_dict={}, meta=dict(epoch=1, config=f"open({str(tmp_path / 'marker')!r}, 'w')")), path)
    assert read_checkpoint(str(path))['meta'] == dict(epoch=1)
    with restricted(trusted=True):
        assert 'config' in read_checkpoint(str(path))['meta']


def test_a_damaged_file_is_one_line(tmp_path):
    path = tmp_path / 'a.pth'
    torch.save(dict(state_dict=dict(a=torch.ones(1000))), path)
    for content in (path.read_bytes()[:2000], b'', b'no checkpoint'):
        path.write_bytes(content)
        with pytest.raises(PreflightError, match='cannot read the checkpoint') as error:
            read_checkpoint(str(path))
        assert 'trust' not in str(error.value)
