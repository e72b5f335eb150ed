import torch
from torch import nn

from mmunorm.norms import UN

from .. import tiny_runs


def test_weights_and_statistics_are_means_and_counts_the_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    states = []
    for step in range(3):
        model = nn.Sequential(nn.Linear(3, 4), UN(4, warmup_iters=1))
        for _ in range(step + 1):
            model(torch.randn(8, 3))
        states.append(model.state_dict())
        weights = dict(state_dict=states[step])
        if step == 0:  # the average that a file of timm has beside its weights
            weights = dict(state_dict={name: 0 * value for name, value in states[0].items()}, state_dict_ema=states[0])
        torch.save(dict(meta=dict(iter=step), optimizer={}, **weights), f'{step}.pth')
    tiny_runs.call('average_checkpoints', '0.pth', '1.pth', '2.pth', '--out', 'new/mean.pth')
    content = torch.load('new/mean.pth', weights_only=False)
    assert content['meta']['iter'] == 2 and 'optimizer' not in content
    for name, value in content['state_dict'].items():
        values = [state[name] for state in states]
        if value.is_floating_point():
            torch.testing.assert_close(value, torch.stack(values).mean(0))
        else:
            assert torch.equal(value, values[2])
    model.load_state_dict(content['state_dict'])
    assert model[1].num_batches_tracked == 3
