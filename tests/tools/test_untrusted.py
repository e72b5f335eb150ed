"""No tool runs what is in a checkpoint, whichever way it gets there."""
import pytest
import torch

from .. import tiny_runs
from ..checkpoints.test_unpickling import Opens


@pytest.fixture
def loaded(classifier, tmp_path):
    """The config, a checkpoint with code in it, and the file that the code would make."""
    config, checkpoint, _ = classifier
    content = tiny_runs.checkpoint(checkpoint)
    content['meta']['extra'] = Opens(tmp_path / 'made')
    path = tmp_path / 'epoch_1.pth'
    torch.save(content, path)
    return config, path, tmp_path / 'made'


CALLS = {
    'resume': lambda c, p, out: ('train', c, '--resume', p, '--work-dir', out),
    'resume the latest': lambda c, p, out: ('train', c, '--resume', '--work-dir', p.parent),
    'load_from': lambda c, p, out: ('train', c, '--work-dir', out, '--cfg-options', f'load_from={p}'),
    'pretrained': lambda c, p, out: ('train', c, '--work-dir', out, '--cfg-options', f'pretrained={p}'),
    'test': lambda c, p, out: ('test', c, p, '--work-dir', out),
    'infer': lambda c, p, out: ('infer', c, p, c.parent / 'data', '--out-dir', out, '--device', 'cpu'),
    'fuse': lambda c, p, out: ('analysis/fuse_and_benchmark', c, p, '--out', out),
    'cka': lambda c, p, out: ('paper:cka', c, p, c, p, '--out', out),
}


def ways(names):
    few = ('resume the latest', 'pretrained', 'infer')
    return pytest.mark.parametrize('way', [
        way if way in few else pytest.param(way, marks=pytest.mark.grid) for way in names])


@ways(CALLS)
def test_code_is_not_run(loaded, tmp_path, capsys, way):
    config, path, made = loaded
    tool, *arguments = CALLS[way](config, path, tmp_path / 'out')
    line = tiny_runs.error_of(capsys, tool, *arguments)
    assert str(path) in line and 'open' in line and '--trust-checkpoint' in line and not made.exists()


def test_a_checkpoint_that_is_trusted(loaded, tmp_path):
    config, path, made = loaded
    tiny_runs.call('test', config, path, '--work-dir', tmp_path / 'out', '--trust-checkpoint')
    assert made.exists()


@ways([way for way in CALLS if way not in ('load_from', 'pretrained')])  # a training may start from them
def test_scale_without_statistics(classifier, tmp_path, capsys, way):
    """A checkpoint of a model with LayerNorm, in a config with UN."""
    config, checkpoint, _ = classifier
    content = tiny_runs.checkpoint(checkpoint)
    content['state_dict'] = {key: value for key, value in content['state_dict'].items()
                             if key.rpartition('.')[2] in ('weight', 'bias', 'relative_position_bias_table')}
    path = tmp_path / 'epoch_1.pth'
    torch.save(content, path)
    tool, *arguments = CALLS[way](config, path, tmp_path / 'out')
    with pytest.raises(SystemExit) as stop:  # after the log has told which names are missing
        tiny_runs.call(tool, *arguments)
    line = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2
    assert str(path) in line and 'statistics' in line and '--norm LN' in line
