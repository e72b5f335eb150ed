"""tools/convert_norms.py: from a LayerNorm config and checkpoint to a UN model that the other tools take."""
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from torch import nn

from mmunorm.benchmark.models import build_models
from mmunorm.cli.arguments import load_config
from mmunorm.config.models import build_model
from mmunorm.norms import UN, TokenBN
from mmunorm.utils import PreflightError

from .. import tiny_runs
from ..deploy.conftest import graph_of

pytestmark = pytest.mark.usefixtures('in_a_folder')


def convert(config, checkpoint, *arguments):
    return tiny_runs.call('convert_norms', config, checkpoint, '--out', 'out', '--device', 'cpu', *arguments)


@pytest.mark.slow
def test_a_converted_model_is_tested_and_trained(ln_classifier, capsys):
    report, metrics = convert(*ln_classifier, '--num-samples', '3', '--test')
    assert len(report.converted) == 7 and not report.kept
    assert report.samples == 4  # whole batches
    printed = capsys.readouterr()
    assert '7 of 7 LayerNorms converted' in printed.out and 'calibrating' not in printed.err  # a bar is for terminals
    assert f'accuracy/top1: {metrics["before"]["accuracy/top1"]:.4g} before' in printed.out

    names = sorted(path.name for path in Path('out').iterdir())
    assert names == ['metrics.json', *(f'swin_un_tiny.{suffix}' for suffix in ('md', 'pth', 'py'))]
    assert json.loads(Path('out/metrics.json').read_text()) == metrics
    assert '| `backbone.norm1` |' in Path('out/swin_un_tiny.md').read_text()
    config, checkpoint = 'out/swin_un_tiny.py', 'out/swin_un_tiny.pth'
    cfg, converted = Config.fromfile(config), tiny_runs.checkpoint(checkpoint)
    assert cfg.model.norm_cfg == dict(type='UN') and cfg.load_from == checkpoint
    assert 'mmunorm' in cfg.custom_imports.imports
    assert converted['meta']['dataset_meta'] == dict(classes=('dark', 'light'))
    assert converted['state_dict'].keys() == build_model(cfg).state_dict().keys()

    tested = tiny_runs.call('test', config, checkpoint, '--work-dir', 'w')
    assert tested['accuracy/top1'] == metrics['after']['accuracy/top1']
    tiny_runs.call('train', config, '--work-dir', 'tuned')
    assert 'do not match exactly' not in ''.join(capsys.readouterr())
    assert tiny_runs.checkpoint('tuned/epoch_1.pth')['state_dict'].keys() == converted['state_dict'].keys()
    assert any('loss_distillation' in entry for entry in tiny_runs.scalars('tuned'))


def test_the_backbone_is_adapted_without_labels(ln_classifier, trained, capsys):
    convert(*ln_classifier, '--to', 'UN+', '--num-samples', '8')
    assert Config.fromfile('out/swin_un_plus_tiny.py').model.norm_cfg.centered == 'frozen'  # keeps means in training
    alone = tiny_runs.checkpoint('out/swin_un_plus_tiny.pth')['state_dict']
    assert sum(bool(value.any()) for key, value in alone.items() if key.endswith('.running_mean')) == 7
    (Path('mine') / 'deeper').mkdir(parents=True)
    for i, path in enumerate(sorted((trained / 'data').glob('*/*.png'))):
        shutil.copy(path, f'mine/deeper/{i}.png')
    # Nothing of the training data is asked for.
    capsys.readouterr()
    report, _ = convert(*ln_classifier, '--to', 'UN+', '--images', 'mine', '--adapt-steps', '30', '--cfg-options',
                        'train_dataloader.dataset.data_root=gone')
    assert report.samples == 4
    printed = capsys.readouterr().out
    first, _, last = map(float, re.findall(r': all tokens ([0-9.]+), centred', printed))
    assert last > first
    adapted = tiny_runs.checkpoint('out/swin_un_plus_tiny.pth')['state_dict']
    moved = {name for name, value in alone.items() if not torch.equal(value, adapted[name])}
    assert 'backbone.stages.0.blocks.0.attn.w_msa.qkv.weight' in moved
    assert not any(name.startswith('head.') for name in moved)  # labels would move it


@pytest.mark.slow
def test_other_goals_and_kept_norms(ln_classifier, capsys):
    report, _ = convert(*ln_classifier, '--to', 'BN', '--keep', 'backbone.stages.0.downsample', 'backbone.norm1')
    assert [row.norm for row in report.kept] == ['backbone.stages.0.downsample.norm', 'backbone.norm1']
    config, checkpoint = 'out/swin_bn_tiny.py', 'out/swin_bn_tiny.pth'
    model = build_model(Config.fromfile(config))
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(TokenBN) == 5 and kinds.count(nn.LayerNorm) == 2 and UN not in kinds
    rows, _, _ = build_models(Config.fromfile(config), checkpoint)
    counts = {name: sum(type(module) is nn.LayerNorm for module in row.modules()) for name, row in rows.items()}
    assert counts == {'LN': 7, 'exact': 1, 'TokenBN': 2, 'TokenBN folded': 0, 'norm-free': 0}
    with pytest.raises(PreflightError, match='lists which of its LayerNorms are converted to TokenBN'):
        load_config(config, norm='UN')
    tiny_runs.call('test', config, checkpoint, '--work-dir', 'w', '--fuse')
    assert 'do not match exactly' not in ''.join(capsys.readouterr())


VIT_HEAD = dict(head=dict(type='VisionTransformerClsHead', num_classes=2, in_channels=16))
# The model, and how many norms the new config lists.
STOCK = {
    'vit': (dict(backbone=dict(type='VisionTransformer', img_size=32, patch_size=8, arch=dict(
        embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=24)), **VIT_HEAD), 5),
    # As mmpretrain wraps it, without a backbone.
    'timm': (dict(type='TimmClassifier', model_name='vit_tiny_patch16_224', img_size=32, num_classes=2, embed_dim=16,
                  depth=2, num_heads=2, patch_size=8), 5),
}


@pytest.mark.parametrize('name', [pytest.param('vit', marks=pytest.mark.grid), 'timm'])
def test_stock_classifiers_get_a_config_that_the_tools_read(name, ln_classifier, tmp_path, capsys):
    model, listed = STOCK[name]
    cfg, config = Config.fromfile(ln_classifier[0]), tmp_path / 'stock.py'
    cfg.model = dict(type='ImageClassifier') | model
    config.write_text(cfg.pretty_text)
    checkpoint = tiny_runs.save_weights(Config.fromfile(config), tmp_path / 'stock.pth', ('dark', 'light'))
    steps = 2 if name == 'timm' else 0
    report, metrics = convert(config, checkpoint, '--test', '--adapt-steps', steps)
    assert not report.kept and ('end to end: all tokens' in capsys.readouterr().out) == bool(steps)
    new = Config.fromfile('out/stock_un.py')
    assert new.model.type == 'ReplacedNorms' and len(new.model.converted) == listed
    capsys.readouterr()
    tested = tiny_runs.call('test', 'out/stock_un.py', 'out/stock_un.pth', '--work-dir', 'w', '--fuse')
    assert tested['accuracy/top1'] == metrics['after']['accuracy/top1']
    printed = ''.join(capsys.readouterr())
    assert 'do not match exactly' not in printed and 'kept:' not in printed  # mmengine's words
    if name == 'timm':
        tiny_runs.call('train', 'out/stock_un.py', '--work-dir', 'tuned')
        assert any('loss_distillation' in entry for entry in tiny_runs.scalars('tuned'))
        built, x = build_model(new).eval(), torch.randn(2, 3, 32, 32)
        torch.testing.assert_close(graph_of(built)(127 + 127 * x.flip(1)), built(x).softmax(1))
