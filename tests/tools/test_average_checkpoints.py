import pytest
import torch
from torch import nn

from mmunorm.norms import UN

from .. import tiny_runs

TOOL = tiny_runs.load_tool('average_checkpoints')


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Three models of one kind with other weights and statistics; 0.pth, 1.pth and 2.pth are their checkpoints."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    found = []
    for step in range(3):
        model = nn.Sequential(nn.Linear(3, 4), UN(4, warmup_iters=1))
        for _ in range(step + 1):
            model(torch.randn(8, 3))
        torch.save(dict(meta=dict(iter=step), state_dict=model.state_dict(), optimizer={}), f'{step}.pth')
        found.append(model)
    return found


def test_weights_and_statistics_are_means_and_counts_the_last(models):
    tiny_runs.call(TOOL, '0.pth', '1.pth', '2.pth', '--out', 'new/mean.pth')
    content = torch.load('new/mean.pth', weights_only=False)
    assert content['meta']['iter'] == 2 and 'optimizer' not in content
    models[0].load_state_dict(content['state_dict'])
    for name, value in models[0].state_dict().items():
        values = [torch.load(f'{i}.pth', weights_only=False)['state_dict'][name] for i in range(3)]
        if value.is_floating_point():
            torch.testing.assert_close(value, torch.stack(values).mean(0))
        else:
            assert torch.equal(value, values[2])
    assert models[0][1].num_batches_tracked == 3


@pytest.mark.parametrize('arguments, message', [
    (['0.pth', '--out', 'mean.pth'], 'at least two'),
    (['0.pth', '1.pth', '--out', './1.pth'], '--out ./1.pth would overwrite'),
    (['0.pth', 'none.pth', '--out', 'mean.pth'], 'there is no checkpoint none.pth'),
    (['0.pth', 'other.pth', '--out', 'mean.pth'], 'other.pth belongs to another model than 0.pth: 0.bias differs'),
])
def test_what_is_wrong_is_one_line_and_nothing_is_written(models, arguments, message, capsys, tmp_path):
    torch.save(nn.Sequential(nn.Linear(3, 5), UN(4)).state_dict(), 'other.pth')
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SystemExit) as stop:
        tiny_runs.call(TOOL, *arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
