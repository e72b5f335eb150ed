"""tools/convert_norms.py: from a LayerNorm config and checkpoint to a UN model that the other tools take."""
import json
import re
from pathlib import Path

import pytest
import timm
import torch
from mmengine.config import Config
from mmengine.registry import DefaultScope
from torch import nn

from mmunorm.benchmark.models import build_models
from mmunorm.cli.arguments import load_config
from mmunorm.config.checkpoints import load_weights
from mmunorm.config.models import build_model
from mmunorm.norms import UN, TokenBN
from mmunorm.utils import PreflightError

from .. import tiny_runs
from ..fusion.models import SWIN_ARCH

CONVERT, INFER, TEST, TRAIN = map(tiny_runs.load_tool, ('convert_norms', 'infer', 'test', 'train'))

pytestmark = pytest.mark.usefixtures('in_a_folder')


def convert(config, checkpoint, *arguments):
    return tiny_runs.call(CONVERT, config, checkpoint, '--out', 'out', '--device', 'cpu', *arguments)


def error_of(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        convert(*arguments)
    assert stop.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def ln(tmp_path):
    """The tiny classifier with LayerNorm, and untrained weights of it."""
    config, checkpoint, _ = tiny_runs.untrained_classifier(tmp_path)
    return with_backbone(config, tmp_path / 'swin_ln_small.py', norm_cfg=dict(type='LN'))


def with_backbone(config, path, **backbone):
    cfg = Config.fromfile(config)
    for name, value in backbone.items():
        cfg.model.backbone[name] = value
    path.write_text(cfg.pretty_text)
    return path, tiny_runs.save_weights(Config.fromfile(path), path.with_suffix('.pth'), ('dark', 'light'))


def states(path):
    return torch.load(path, map_location='cpu', weights_only=False)


@pytest.mark.slow
def test_a_converted_model_is_tested_folded_and_trained(ln, tmp_path, capsys):
    report, metrics = convert(*ln, '--num-samples', '3', '--test')
    assert len(report.converted) == 7 and not report.kept
    assert report.samples == 4  # whole batches
    printed = capsys.readouterr()
    assert '7 of 7 LayerNorms converted' in printed.out and 'calibrating' not in printed.err  # a bar is for terminals
    assert f'accuracy/top1: {metrics["before"]["accuracy/top1"]:.4g} before' in printed.out

    names = sorted(path.name for path in (tmp_path / 'out').iterdir())
    assert names == ['metrics.json', *(f'swin_un_small.{suffix}' for suffix in ('json', 'md', 'pth', 'py'))]
    assert json.loads((tmp_path / 'out/metrics.json').read_text()) == metrics
    assert json.loads((tmp_path / 'out/swin_un_small.json').read_text()) == report.as_dict()
    assert '|`backbone.norm1`|' in (tmp_path / 'out/swin_un_small.md').read_text()
    config, checkpoint = 'out/swin_un_small.py', 'out/swin_un_small.pth'
    cfg = Config.fromfile(config)
    assert cfg.model.backbone.norm_cfg == dict(type='UN') and cfg.load_from == checkpoint
    assert 'mmunorm' in cfg.custom_imports.imports
    assert states(checkpoint)['meta']['dataset_meta'] == dict(classes=('dark', 'light'))
    assert states(checkpoint)['state_dict'].keys() == build_model(cfg).state_dict().keys()

    DefaultScope._instance_dict.clear()
    for fuse in ([], ['--fuse']):
        tested = tiny_runs.call(TEST, config, checkpoint, '--work-dir', 'w', *fuse)
        assert tested['accuracy/top1'] == metrics['after']['accuracy/top1']
    assert 'missing' not in ''.join(capsys.readouterr())
    tiny_runs.call(TRAIN, config, '--work-dir', 'tuned')
    assert 'missing' not in ''.join(capsys.readouterr())
    assert states('tuned/epoch_1.pth')['state_dict'].keys() == states(checkpoint)['state_dict'].keys()
    assert 'loss_distillation' in next((tmp_path / 'tuned').glob('*/vis_data/scalars.json')).read_text()


def test_the_backbone_is_adapted_without_labels(ln, capsys):
    convert(*ln, '--num-samples', '8')
    alone = states('out/swin_un_small.pth')['state_dict']
    convert(*ln, '--num-samples', '8', '--adapt-steps', '30')
    adapted = states('out/swin_un_small.pth')['state_dict']
    before, after = (float(share) for share in re.findall(r'([0-9.]+)%', capsys.readouterr().out.splitlines()[-5]))
    assert after < 0.9 * before
    moved = {name for name, value in alone.items() if not torch.equal(value, adapted[name])}
    assert 'backbone.stages.0.blocks.0.attn.w_msa.qkv.weight' in moved
    assert not any(name.startswith('head.') for name in moved)  # labels would move it


@pytest.mark.slow
def test_other_goals_and_kept_norms(ln, capsys):
    report, _ = convert(*ln, '--to', 'BN', '--keep', r'.*downsample\.norm', 'backbone.norm1')
    assert [row.norm for row in report.kept] == ['backbone.stages.0.downsample.norm', 'backbone.norm1']
    config, checkpoint = 'out/swin_bn_small.py', 'out/swin_bn_small.pth'
    model = build_model(Config.fromfile(config))
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(TokenBN) == 5 and kinds.count(nn.LayerNorm) == 2 and UN not in kinds
    rows = build_models(Config.fromfile(config), checkpoint).rows
    counts = {name: sum(isinstance(module, nn.LayerNorm) for module in row.modules()) for name, row in rows.items()}
    assert counts == {'LN': 7, 'TokenBN': 2, 'TokenBN folded': 2, 'norm-free': 0}
    with pytest.raises(PreflightError, match='lists which of its LayerNorms are converted to TokenBN'):
        load_config(config, norm='UN')
    DefaultScope._instance_dict.clear()
    tiny_runs.call(TEST, config, checkpoint, '--work-dir', 'w', '--fuse')
    tiny_runs.call(INFER, config, checkpoint, ln[0].parent / 'data', '--out-dir', 'drawn', '--device', 'cpu')
    tiny_runs.call(TRAIN, config, '--work-dir', 'tuned')
    assert states('tuned/epoch_1.pth')['state_dict'].keys() == states(checkpoint)['state_dict'].keys()
    assert 'missing' not in ''.join(capsys.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize('norm', ['UN+', 'mine=UN,centered=True'])
def test_a_converted_model_keeps_its_means(ln, norm):
    convert(*ln, '--to', norm)
    config, = (path for path in Path('out').glob('*.py'))
    assert Config.fromfile(config).model.backbone.norm_cfg.centered == 'frozen'
    tiny_runs.call(TRAIN, config, '--work-dir', 'tuned')
    before, after = (states(path)['state_dict'] for path in (config.with_suffix('.pth'), 'tuned/epoch_1.pth'))
    means = [key for key in before if key.endswith('.running_mean')]
    assert len(means) == 7 and all(before[key].any() and torch.equal(before[key], after[key]) for key in means)


def test_what_is_refused(ln, tmp_path, capsys):
    config, checkpoint = ln
    assert 'there is no checkpoint gone.pth' in error_of(capsys, config, 'gone.pth')
    assert "there is no norm 'XN'" in error_of(capsys, config, checkpoint, '--to', 'XN')
    assert 'DyT is no offline norm' in error_of(capsys, config, checkpoint, '--to', 'DyT')
    assert "keep: no LayerNorm has a name that 'x'" in error_of(capsys, config, checkpoint, '--keep', 'x')
    other = with_backbone(config, tmp_path / 'other.py', arch=dict(embed_dims=6, depths=[1, 1], num_heads=[1, 2]))
    assert 'does not fit the config' in error_of(capsys, config, other[1])
    un = with_backbone(config, tmp_path / 'un.py', norm_cfg=dict(type='UN'))
    assert 'ImageClassifier has no LayerNorm to convert' in error_of(capsys, *un)
    assert 'the data set is not there' in error_of(
        capsys, config, checkpoint, '--cfg-options', 'train_dataloader.dataset.data_root=gone')
    without = tmp_path / 'without.py'
    without.write_text(f"_base_ = ['{config}']\ntrain_dataloader = None\n")
    assert 'without.py has no train_dataloader' in error_of(capsys, without, checkpoint)
    bad = states(checkpoint)
    bad['state_dict']['backbone.patch_embed.projection.bias'][0] = torch.nan
    torch.save(bad, tmp_path / 'bad.pth')
    assert 'the input of backbone.patch_embed.norm is not finite' in error_of(capsys, config, 'bad.pth')
    assert '--adapt-steps: must be at least 0, got -1' in error_of(capsys, config, checkpoint, '--adapt-steps', '-1')
    assert not list((tmp_path / 'out').iterdir())


STOCK = {
    'swin': (dict(type='SwinTransformer', arch=SWIN_ARCH, img_size=32, window_size=4, out_indices=(1, )), 16,
             'UNSwinTransformer'),
    't2t': (dict(type='T2T_ViT', img_size=32, embed_dims=16, num_layers=2, t2t_cfg=dict(token_dims=8),
                 layer_cfgs=dict(num_heads=2, feedforward_channels=24)), 16, 'T2T_ViT'),
    'vit': (dict(type='VisionTransformer', img_size=32, patch_size=8,
                 arch=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=24)), 16,
            'VisionTransformer'),
}


@pytest.mark.parametrize('name', STOCK)
def test_stock_classifiers_get_a_config_with_norm_cfg(name, ln, tmp_path, capsys):
    backbone, channels, kind = STOCK[name]
    cfg = Config.fromfile(ln[0])
    cfg.model = dict(type='ImageClassifier', backbone=backbone)
    cfg.model.head = dict(type='LinearClsHead' if name == 'swin' else 'VisionTransformerClsHead', num_classes=2,
                          in_channels=channels)
    if name == 'swin':
        cfg.model.neck = dict(type='GlobalAveragePooling')
    path = tmp_path / 'stock.py'
    path.write_text(cfg.pretty_text)
    checkpoint = tiny_runs.save_weights(Config.fromfile(path), tmp_path / 'stock.pth', ('dark', 'light'))
    report, metrics = convert(path, checkpoint, '--test')
    assert not report.kept
    new = Config.fromfile('out/stock_un.py')
    assert new.model.backbone.type == kind
    if name == 't2t':  # keeps mmpretrain's attention, which differs from UNT2TViT's
        assert new.model.type == 'ConvertedModel' and len(new.model.converted) == 9
    else:
        assert new.model.type == 'ImageClassifier' and new.model.backbone.norm_cfg == dict(type='UN')
    assert new.custom_hooks[-1].norm_cfg == (dict(type='LN', eps=1e-6) if name == 'vit' else dict(type='LN'))
    capsys.readouterr()
    DefaultScope._instance_dict.clear()
    tested = tiny_runs.call(TEST, 'out/stock_un.py', 'out/stock_un.pth', '--work-dir', 'w', '--fuse')
    assert tested['accuracy/top1'] == metrics['after']['accuracy/top1']
    printed = ''.join(capsys.readouterr())
    assert 'missing' not in printed and 'unexpected' not in printed and 'kept:' not in printed


def test_a_model_without_a_backbone(ln, tmp_path, capsys):
    """timm's, as mmpretrain wraps it: the model's type lists the norms."""
    cfg = Config.fromfile(ln[0])
    size, _ = TIMM['vit_tiny_patch16_224']
    cfg.model = dict(type='TimmClassifier', model_name='vit_tiny_patch16_224', img_size=32, num_classes=2, **size)
    path = tmp_path / 'timm.py'
    path.write_text(cfg.pretty_text)
    checkpoint = tiny_runs.save_weights(Config.fromfile(path), tmp_path / 'timm.pth', ('dark', 'light'))
    report, metrics = convert(path, checkpoint, '--test')
    assert len(report.converted) == 5
    new = Config.fromfile('out/timm_un.py')
    assert new.model.type == 'ConvertedModel' and len(new.model.converted) == 5
    capsys.readouterr()
    DefaultScope._instance_dict.clear()
    tested = tiny_runs.call(TEST, 'out/timm_un.py', 'out/timm_un.pth', '--work-dir', 'w')
    assert tested['accuracy/top1'] == metrics['after']['accuracy/top1']
    assert 'missing' not in ''.join(capsys.readouterr())


@pytest.mark.slow
def test_a_stock_detector(tmp_path, capsys):
    config, options = tiny_runs.write_detector(tmp_path)
    cfg = Config.fromfile(config)
    cfg.model.backbone = dict(
        type='SwinTransformer', embed_dims=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8), window_size=7,
        out_indices=(0, 1, 2, 3), init_cfg=None)
    path = tmp_path / 'stock_ln_maskrcnn.py'
    path.write_text(cfg.pretty_text)
    checkpoint = tiny_runs.save_weights(Config.fromfile(path), tmp_path / 'a.pth', [f'class {i}' for i in range(80)])
    options = ('--cfg-options', *(option for option in options if not option.startswith('pretrained')))
    report, metrics = convert(path, checkpoint, '--num-samples', '2', '--test', *options)
    assert len(report.converted) == 16 and not report.kept
    assert metrics['after'].keys() == metrics['before'].keys() >= {'coco/bbox_mAP', 'coco/segm_mAP'}
    DefaultScope._instance_dict.clear()
    tested = tiny_runs.call(TEST, 'out/stock_un_maskrcnn.py', 'out/stock_un_maskrcnn.pth', '--work-dir', 'w', '--fuse')
    assert tested == pytest.approx(metrics['after'], abs=1e-3)
    assert 'kept:' not in ''.join(capsys.readouterr())


TIMM = {
    'swin_tiny_patch4_window7_224': (dict(embed_dim=8, depths=(2, 2), num_heads=(2, 4), window_size=4), 'swin'),
    'vit_tiny_patch16_224': (dict(embed_dim=16, depth=2, num_heads=2, patch_size=8, mlp_ratio=1.5), 'vit'),
    'deit_tiny_distilled_patch16_224': (dict(embed_dim=16, depth=2, num_heads=2, patch_size=8, mlp_ratio=1.5), 'vit'),
}


def official(weights):
    """timm's Swin under the names of the official one, whose merging comes after a stage."""
    named = {}
    for name, value in weights.items():
        first, *rest = name.split('.')
        if first == 'layers' and rest[1] == 'downsample':
            rest[0] = str(int(rest[0]) - 1)
        named['.'.join([first, *rest]).replace('head.fc.', 'head.')] = value
    return dict(model=named)


@pytest.mark.parametrize('name, form', [*((name, dict) for name in TIMM), ('swin_tiny_patch4_window7_224', official)])
def test_public_weights(name, form, tmp_path):
    """Weights in timm's names, and the official Swin's, give timm's logits."""
    size, kind = TIMM[name]
    source = timm.create_model(name, img_size=32, num_classes=5, **size).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1]**0.5)
    torch.save(form(source.state_dict()), tmp_path / 'public.pth')
    backbone, channels, _ = STOCK[kind]
    distilled = 'distilled' in name
    model = dict(type='ImageClassifier', backbone=dict(backbone))
    model['head'] = dict(type='LinearClsHead' if kind == 'swin' else 'VisionTransformerClsHead', num_classes=5,
                         in_channels=channels)
    if kind == 'swin':
        model['neck'] = dict(type='GlobalAveragePooling')
    if distilled:
        model['backbone']['type'], model['head']['type'] = 'DistilledVisionTransformer', 'DeiTClsHead'
    built = build_model(Config(dict(model=model, default_scope='mmpretrain'))).eval()
    load_weights(built, str(tmp_path / 'public.pth'))
    pictures = torch.randn(3, 3, 32, 32, generator=generator)
    torch.testing.assert_close(built(pictures, mode='tensor'), source(pictures), rtol=1e-4, atol=1e-4)

    model['head']['num_classes'] = 6
    other = build_model(Config(dict(model=model, default_scope='mmpretrain')))
    with pytest.raises(PreflightError, match='does not fit the config'):
        load_weights(other, str(tmp_path / 'public.pth'))
