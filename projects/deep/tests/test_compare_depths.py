import os
import re
from contextlib import nullcontext
from pathlib import Path

import cv2
import pytest
from mmengine.config import Config

from projects.translation.tests.test_model import CONFIG
from tests import tiny_runs

TOOL = tiny_runs.load_tool('deep:compare_depths')


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path(tiny_runs.write_classifier(tmp_path))
    path.write_text(path.read_text() + """
model['backbone'] = dict(
    type='UNVisionTransformer', arch=dict(embed_dims=8, num_layers=2, num_heads=2, feedforward_channels=8),
    img_size=32, patch_size=16, norm_cfg=dict(type='UN', warmup_iters=1), residual_cfg=dict(type='PreNorm'))
model['neck'] = None
model['head'] = dict(type='VisionTransformerClsHead', num_classes=2, in_channels=8)
""")
    return str(path)


def compare(config, *arguments, status=0):
    with pytest.raises(SystemExit) if status else nullcontext() as stop:
        tiny_runs.call(TOOL, config, '--out', 'out', '--seeds', 2, *arguments)
    assert not status or stop.value.code == status


def test_every_scheme_norm_and_depth_is_trained_once(config, fake, capsys):
    fake('postnorm_ln_3', 'diverges')
    arguments = ('--residuals', 'PostNorm', 'Slow=BranchNorm,warmup_iters=1', '--norms', 'LN', 'UN',
                 '--depths', 2, 3, '--seeds', 1)
    compare(config, *arguments)
    assert len(fake.calls()) == 2 * 2 * 2
    lines = [line for line in Path('out/depths.md').read_text().splitlines() if line.startswith('|')]
    assert lines[3] == '| Slow | LN | 50.00 | 50.00 |'
    assert '| PostNorm | LN | 50.00 | FAIL at step 7 |' in lines and len(lines) == 6
    backbone = Config.fromfile('out/slow_un_3/seed_0.py').model.backbone
    assert backbone.arch.num_layers == 3 and backbone.residual_cfg == dict(type='BranchNorm', warmup_iters=1)
    assert backbone.norm_cfg.type == 'UN'
    assert Config.fromfile('out/postnorm_ln_2/seed_0.py').model.backbone.norm_cfg.type == 'LN'
    assert len(Path('out/depths.csv').read_text().splitlines()) == 9
    assert cv2.imread('out/depths.png') is not None
    capsys.readouterr()
    compare(config, *arguments)
    assert fake.calls() == [] and '8 of 8 runs are finished' in capsys.readouterr().out


def test_both_stacks_of_a_transformer_of_translation_get_the_depth(tmp_path, fake, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'reversed_un.py').write_text(CONFIG.format(root=tiny_runs.ROOT))
    compare('reversed_un.py', '--residuals', 'PreNorm', '--norms', 'UN', '--depths', 3)
    arch = Config.fromfile('out/prenorm_un_3/seed_1.py').model.backbone.arch
    assert arch.encoder_layers == arch.decoder_layers == 3 and 'num_layers' not in arch


@pytest.mark.parametrize(('arguments', 'text'), [
    (['--residuals', 'PreNrm'], "no scheme 'PreNrm'"),
    (['--residuals', 'ReZero'], 'scheme without norms'),
    (['--residuals', 'A=BranchNorm,warmup_iters=-1'], 'warmup_iters'),
    (['--residuals', 'PreNorm', 'PreNorm'], '--residuals: two have the same name'),
    (['--residuals', 'PreNorm', '--norms', 'N=LN', 'n=RMSN'], '--norms: two have .* the same folder'),
    (['--residuals', 'PreNorm', '--depths', '2', '2'], '--depths names one twice'),
    (['--residuals', 'PreNorm', '--depths', '0'], '--depths: must be at least 1'),
    (['--residuals', 'PreNorm', '--norms', 'XN'], "no norm 'XN'")])
def test_errors(config, fake, arguments, text, capsys):
    compare(config, *arguments, status=2)
    assert re.search(text, capsys.readouterr().err)
    assert fake.calls() == [] and not os.path.exists('out')


@pytest.mark.parametrize('missing', ['num_layers=2, ', ", residual_cfg=dict(type='PreNorm')"])
def test_a_config_without_layers_or_a_residual_scheme_is_refused(config, fake, capsys, missing):
    path = Path(config)
    path.write_text(path.read_text().replace(missing, ''))
    compare(config, '--residuals', 'PreNorm', status=2)
    assert 'num_layers' in capsys.readouterr().err and fake.calls() == []
