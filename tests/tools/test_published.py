"""The tools read checkpoints of other projects without conversion."""
import pickle

import pytest
import torch

from mmunorm.cli.arguments import load_config
from mmunorm.config.models import load_model

from .. import tiny_runs
from ..checkpoints.test_layouts import SlabLinearNorm, official, timm_model

SIZES = dict(img_size=32, num_classes=2, embed_dim=12, depths=(1, 1), num_heads=(1, 2), window_size=4)

pytestmark = pytest.mark.usefixtures('in_a_folder')


@pytest.fixture
def published(classifier, tmp_path):
    """The tiny classifier's config, and weights of it as SLAB publishes them."""
    content = official(timm_model('swin', SlabLinearNorm, **SIZES).state_dict())
    content['model']['head.weight'] *= 0.1  # so that no score is 0 or 1
    torch.save(content, tmp_path / 'slab.pth')
    return classifier[0], tmp_path / 'slab.pth'


def scores(config, checkpoint, *arguments):
    tiny_runs.call('test', config, checkpoint, '--work-dir', 'w', '--out', 'scores.pkl', *arguments)
    with open('scores.pkl', 'rb') as file:
        return torch.stack([sample['pred_score'] for sample in pickle.load(file)])


def test_slab_s_file_is_tested_folded_and_saved(published, capsys):
    config, checkpoint = published
    plain = scores(config, checkpoint, '--norm', 'RepBN')
    model = load_model(load_config(str(config), norm='RepBN'), str(checkpoint))
    torch.save(dict(state_dict=model.state_dict()), 'ours.pth')
    torch.testing.assert_close(plain, scores(config, 'ours.pth', '--norm', 'RepBN'))
    assert plain.std(dim=0).min() > 0.01
    folded = scores(config, checkpoint, '--norm', 'RepBN', '--fuse', '--save', 'folded.pth')
    torch.testing.assert_close(folded, plain, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(scores(config, 'folded.pth', '--norm', 'RepBN'), folded)
    printed = ''.join(capsys.readouterr())
    assert 'do not match exactly' not in printed and 'kept:' not in printed  # mmengine's words


@pytest.mark.parametrize('norm, more, message', [
    ('RepBN', {'layers.0.blocks.0.attn.dwc.weight': torch.zeros(1)}, 'linear attention (slab_*.pth) are not supported'),
    ('LN', {}, 'whose norms are RepBN: add --norm RepBN.')])
def test_models_that_do_not_fit_slab_s_file_are_refused_before_a_test(norm, more, message, published, capsys):
    config, checkpoint = published
    content = torch.load(checkpoint)
    content['model'].update(more)
    torch.save(content, checkpoint)
    assert message in tiny_runs.error_of(capsys, 'test', config, checkpoint, '--norm', norm)


def test_every_tool_chooses_the_same_of_several_weights(classifier, tmp_path):
    config, checkpoint, data = classifier
    weights = tiny_runs.checkpoint(checkpoint)['state_dict']
    worse = {name: torch.zeros_like(value) for name, value in weights.items()}
    torch.save(dict(state_dict=worse, state_dict_ema=weights), 'both.pth')
    expected = scores(config, checkpoint)
    assert expected.std(dim=0).min() > 1e-3
    torch.testing.assert_close(scores(config, 'both.pth', '--trust-checkpoint'), expected)
    torch.testing.assert_close(scores(config, 'both.pth', '--fuse', '--save', 'folded.pth'), expected,
                               rtol=1e-3, atol=1e-4)
    tiny_runs.call('average_checkpoints', 'both.pth', 'both.pth', '--out', 'mean.pth')
    assert torch.equal(tiny_runs.checkpoint('mean.pth')['state_dict']['head.fc.weight'], weights['head.fc.weight'])
    # A training from it, at a rate of 0; test_starting.py has `pretrained`.
    tiny_runs.call('train', config, '--work-dir', 'from', '--cfg-options', f'load_from={tmp_path}/both.pth',
                   'optim_wrapper.optimizer.lr=0.0')
    name = 'backbone.stages.0.blocks.0.attn.w_msa.qkv.weight'
    trained = tiny_runs.checkpoint('from/epoch_1.pth')['state_dict']
    assert torch.equal(trained[name], weights[name])
