"""The tools read checkpoints of other projects without conversion."""
import pickle

import torch

from .. import tiny_runs
from ..checkpoints.test_layouts import official, timm_model

SIZES = dict(img_size=32, num_classes=2, embed_dim=12, depths=(1, 1), num_heads=(1, 2), window_size=4)


def scores(config, checkpoint, *arguments):
    tiny_runs.call('test', config, checkpoint, '--work-dir', 'w', '--out', 'scores.pkl', *arguments)
    with open('scores.pkl', 'rb') as file:
        return torch.stack([sample['pred_score'] for sample in pickle.load(file)])


def test_every_tool_chooses_the_same_of_several_weights(in_a_folder, classifier, tmp_path, capsys):
    config, *_ = classifier
    content = official(timm_model('swin', **SIZES).state_dict())
    torch.save(content, 'official.pth')
    weights = content['model']
    worse = {name: torch.zeros_like(value) for name, value in weights.items()}
    torch.save(dict(state_dict=worse, state_dict_ema=weights), 'both.pth')
    expected = scores(config, 'official.pth', '--norm', 'LN')
    assert expected.std(dim=0).min() > 1e-3
    torch.testing.assert_close(scores(config, 'both.pth', '--norm', 'LN', '--fuse'), expected, rtol=1e-3, atol=1e-4)
    printed = ''.join(capsys.readouterr())
    assert 'do not match exactly' not in printed  # mmengine's words
    tiny_runs.call('average_checkpoints', 'both.pth', 'both.pth', '--out', 'mean.pth')
    assert torch.equal(tiny_runs.checkpoint('mean.pth')['state_dict']['head.weight'], weights['head.weight'])
    # A training from it, at a rate of 0; test_starting.py has `pretrained`.
    tiny_runs.call('train', config, '--norm', 'LN', '--work-dir', 'from', '--cfg-options',
                   f'load_from={tmp_path}/both.pth', 'optim_wrapper.optimizer.lr=0.0')
    after = tiny_runs.checkpoint('from/epoch_1.pth')['state_dict']
    assert torch.equal(after['backbone.stages.0.blocks.0.attn.w_msa.qkv.weight'],
                       weights['layers.0.blocks.0.attn.qkv.weight'])
