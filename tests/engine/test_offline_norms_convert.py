"""A run with UN that starts from weights of LayerNorm."""
import os
import random
import re

import numpy as np
import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS

from mmunorm import adapt, convert_norms
from mmunorm.cli import training
from mmunorm.cli.arguments import set_dataloader_defaults
from mmunorm.config.models import build_model
from mmunorm.config.presets import set_norm
from mmunorm.conversion import convert_loaded, with_layer_norms
from mmunorm.engine.calibration import training_batches
from mmunorm.engine.offline_norms import OfflineNormHook
from mmunorm.norms import OfflineNorm

from .. import processes, tiny_runs


@pytest.fixture
def started(tmp_path):
    """A config with UN that starts from weights of LayerNorm and learns nothing, and the model with LayerNorm."""
    path = tiny_runs.write_classifier(tmp_path)
    cfg = Config.fromfile(path)
    set_dataloader_defaults(cfg)
    set_norm(cfg, dict(type='LN'))
    torch.manual_seed(0)
    model = build_model(cfg)
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'ln.pth')
    text = path.read_text().replace('lr=0.1, weight_decay=0.1', 'lr=0.0')
    hook = "custom_hooks = [dict(type='OfflineNormHook', adapt_steps=0)]"
    path.write_text(f"{text}load_from = '{tmp_path}/ln.pth'\n{hook}\n")
    return path, cfg, model


def norm_weights(state):
    return {key: value for key, value in state.items() if 'norm' in key and key.endswith(('weight', 'bias'))}


def test_norms_are_fitted_once(started, tmp_path):
    path, cfg, model = started
    work_dir = tmp_path / 'w'
    tiny_runs.call('train', path, '--work-dir', work_dir)
    convert_norms(model, training_batches(cfg, 4))
    checkpoint = torch.load(work_dir / 'epoch_1.pth', weights_only=False)['state_dict']
    torch.testing.assert_close(norm_weights(checkpoint), norm_weights(model.state_dict()), rtol=0, atol=0)
    log = next(work_dir.glob('*/*.log')).read_text()
    assert 'fitting its norms' in log
    assert (work_dir / 'conversion.md').read_text().startswith('7 of 7 LayerNorms converted, statistics of 4 samples')

    tiny_runs.call('train', path, '--work-dir', work_dir, '--resume', '--cfg-options', 'train_cfg.max_epochs=2')
    logs = ''.join(path.read_text() for path in work_dir.glob('*/*.log'))  # one file, if in the same second
    assert logs.count('fitting its norms') == 1 and (work_dir / 'epoch_2.pth').exists()


class Drawn(Exception):
    """Ends a run whose random numbers are known."""


def test_the_random_numbers_after_a_conversion_are_those_of_the_seed(started, tmp_path, monkeypatch):
    path, drawn, convert = started[0], [], OfflineNormHook._convert

    def convert_and_draw(hook, runner):
        convert(hook, runner)
        drawn.append((torch.rand(()).item(), random.random(), np.random.rand()))
        raise Drawn

    monkeypatch.setattr(OfflineNormHook, '_convert', convert_and_draw)
    for name, seed, samples in (('a', 1, 4), ('b', 1, 2), ('c', 2, 4)):
        options = f'randomness.seed={seed}', f'custom_hooks.0.num_samples={samples}'
        with pytest.raises(Drawn):
            tiny_runs.call('train', path, '--work-dir', tmp_path / name, '--cfg-options', *options)
    first, same, other = drawn
    assert first == same and not set(first) & set(other)


def test_the_backbone_is_adapted(started, tmp_path):
    path, _, model = started
    path.write_text(path.read_text().replace('adapt_steps=0', 'adapt_steps=40'))
    tiny_runs.call('train', path, '--work-dir', tmp_path / 'w')
    log = next((tmp_path / 'w').glob('*/*.log')).read_text()
    first, _, last = map(float, re.findall(r': all tokens ([\d.]+), centred', log))
    assert 1 - last < 0.7 * (1 - first)
    adapted = torch.load(tmp_path / 'w/epoch_1.pth', weights_only=False)['state_dict']
    name = 'backbone.stages.0.blocks.0.attn.w_msa.qkv.weight'
    assert not torch.equal(adapted[name], model.state_dict()[name])


def test_errors_are_one_line(started, tmp_path, capsys):
    path = started[0]
    path.write_text(path.read_text().replace('adapt_steps=0', 'convert=False'))
    weights = torch.load(tmp_path / 'ln.pth')
    weights['state_dict']['backbone.patch_embed.projection.weight'].fill_(float('nan'))
    torch.save(weights, tmp_path / 'ln.pth')
    for option, message in (('convert=False', f'{tmp_path}/ln.pth has the scale but not the statistics of backbone'), (
            'num_samples=4', f'cannot fit norms to the LayerNorms of {tmp_path}/ln.pth: the input of '
            'backbone.patch_embed.norm')):
        path.write_text(path.read_text().replace('convert=False', option))
        with pytest.raises(SystemExit):
            tiny_runs.call('train', path, '--work-dir', tmp_path / 'w')
        error = capsys.readouterr().err
        assert message in error and 'Traceback' not in error


@pytest.mark.parametrize('scope', ['mmdet', 'mmpretrain', 'mmunorm'])
def test_stock_swins_load_weights_of_layer_norm(tmp_path, scope):
    torch.manual_seed(0)
    settings = dict(embed_dims=8, depths=[1, 1], num_heads=[1, 2]) if scope == 'mmdet' else dict(
        arch=dict(embed_dims=8, depths=[1, 1], num_heads=[1, 2]), img_size=32)
    kind = 'UNSwinTransformer' if scope == 'mmunorm' else f'{scope}.SwinTransformer'
    settings.update(type=kind, window_size=4, out_indices=(0, 1))
    ln = MODELS.build(dict(settings, norm_cfg=dict(type='LN')))
    weights = {f'backbone.{key}': value for key, value in ln.state_dict().items()}
    torch.save(dict(state_dict=weights), tmp_path / 'ln.pth')
    model = MODELS.build(ConfigDict(settings, norm_cfg=dict(type='UN'), init_cfg=dict(
        type='Pretrained', checkpoint=str(tmp_path / 'ln.pth'), prefix='backbone.')))
    model.init_weights()
    lacking = [norm.lacks_statistics for norm in model.modules() if isinstance(norm, OfflineNorm)]
    assert lacking and all(lacking)
    x = torch.randn(4, 3, 32, 32)
    teacher = with_layer_norms(model)
    convert_loaded(model, [x])
    ln.eval(), model.eval()  # mmpretrain's return nothing
    for got, wanted, taught in zip(model(x), ln(x), teacher(x), strict=True):
        assert (got - wanted).square().mean() < 0.4 * wanted.var()
        torch.testing.assert_close(taught, wanted)
    converted, _, adapted = adapt(model, teacher, x, 20, lr=1e-3, block_lr=1e-3).agreements.values()
    assert 1 - adapted.tokens < 0.9 * (1 - converted.tokens)


def trained_norms(rank, path):
    os.environ['RANK'] = str(rank)
    cfg = Config.fromfile(path)
    set_dataloader_defaults(cfg)
    cfg.launcher, cfg.work_dir = 'pytorch', str(path.parent / 'w')
    runner = training.build_runner(cfg)
    runner.train()
    return norm_weights(runner.model.module.state_dict())


@pytest.mark.slow
def test_all_processes_get_the_norms_of_the_first(started):
    path, _, model = started
    first, second = processes.run(trained_norms, path)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert not torch.equal(first['backbone.norm1.weight'], model.state_dict()['backbone.norm1.weight'])
