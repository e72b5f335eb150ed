import json

import torch

from mmunorm.checkpoints.folded import folding_of

from .. import tiny_runs

FILES = ['benchmark.json', 'benchmark.md']


def call(*arguments):
    return tiny_runs.call('analysis/fuse_and_benchmark', *arguments, '--device', 'cpu')


def test_a_checkpoint_is_measured_and_saved_folded(classifier, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, checkpoint, _ = classifier
    call(config, checkpoint, '--batch-size', '2', '--repeat', '2', '--shape', '40', '--warmup', '1', '--save',
         'new/folded.pth')
    folder = tmp_path / 'work_dirs/classifier/fuse_and_benchmark'
    assert sorted(path.name for path in folder.iterdir()) == FILES
    printed = capsys.readouterr()
    text = (folder / 'benchmark.md').read_text()
    assert text in printed.out and str(folder.relative_to(tmp_path) / 'benchmark.md') in printed.out
    assert 'measuring' not in printed.err  # the bar is for terminals
    assert '| norm-free | ' in text and '40 x 40' in text
    result = json.loads((folder / 'benchmark.json').read_text())
    assert str(checkpoint) in result['notes'][0] and 'random' not in result['notes'][0]
    assert [row['name'] for row in result['rows']] == ['LN', 'exact', 'UN', 'UN folded', 'norm-free']
    # 40 pixels are 10 tokens, which windows of 4 pad.
    for row in (1, 3):
        assert result['rows'][row]['output_difference']['relative'] < 1e-4
    assert result['fusion']['folded'] == 7 and result['fusion']['kept'] == 0

    folded, state = tiny_runs.checkpoint('new/folded.pth'), tiny_runs.checkpoint(checkpoint)['state_dict']
    assert folding_of(folded) and set(folded['meta']['dataset_meta']['classes']) == {'dark', 'light'}
    block = 'backbone.stages.0.blocks.0'
    qkv, norm = f'{block}.attn.w_msa.qkv.weight', f'{block}.norm1'
    expected = state[qkv] * state[f'{norm}.weight'] / (state[f'{norm}.running_var'] + 1e-5).sqrt()
    torch.testing.assert_close(folded['state_dict'][qkv], expected)
