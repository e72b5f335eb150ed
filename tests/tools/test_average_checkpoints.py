import torch
from torch import nn

from mmunorm.norms import UN

from .. import tiny_runs


def test_weights_and_statistics_are_means_and_counts_the_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in range(3):
        model = nn.Sequential(nn.Linear(3, 4), UN(4, warmup_iters=1))
        for _ in range(step + 1):
            model(torch.randn(8, 3))
        torch.save(dict(meta=dict(iter=step), state_dict=model.state_dict(), optimizer={}), f'{step}.pth')
    tiny_runs.call('average_checkpoints', '0.pth', '1.pth', '2.pth', '--out', 'new/mean.pth')
    content = torch.load('new/mean.pth', weights_only=False)
    assert content['meta']['iter'] == 2 and 'optimizer' not in content
    model.load_state_dict(content['state_dict'])
    for name, value in model.state_dict().items():
        values = [torch.load(f'{i}.pth', weights_only=False)['state_dict'][name] for i in range(3)]
        if value.is_floating_point():
            torch.testing.assert_close(value, torch.stack(values).mean(0))
        else:
            assert torch.equal(value, values[2])
    assert model[1].num_batches_tracked == 3
