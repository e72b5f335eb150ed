"""The weights that IAT's authors released, in a file that has their names and shapes and random values."""
import re

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS

from mmunorm.checkpoints.loading import load_weights
from mmunorm.config.models import build_model
from mmunorm.config.starting import fit_load_from, fit_pretrained
from mmunorm.utils import PreflightError
from projects.low_light.low_light import IAT, ImageEnhancer
from tests import tiny_runs

from .test_iat import images, trained

LN_CONFIG = tiny_runs.ROOT / 'projects/low_light/configs/iat/iat_ln_lol_v1.py'
THEIRS = [  # regular expressions of our names, the first that fits
    (r'local_branch\.stem\.(.*)', r'local_net.conv1.\1'),
    (r'local_branch\.(mul|add)\.(.*)', r'local_net.\1_end.0.\2'),
    (r'local_branch\.(.*)\.position\.(.*)', r'local_net.\1.pos_embed.\2'),
    (r'local_branch\.(.*)\.depthwise\.(.*)', r'local_net.\1.attn.\2'),
    (r'local_branch\.(.*)\.(fc.*)', r'local_net.\1.mlp.\2'),
    (r'local_branch\.(.*)\.scale(.)\.weight', r'local_net.\1.gamma_\2'),
    (r'local_branch\.(.*norm.)\.weight', r'local_net.\1.alpha'),
    (r'local_branch\.(.*norm.)\.bias', r'local_net.\1.beta'),
    (r'local_branch\.(.*norm.)\.matrix', r'local_net.\1.color'),
    (r'local_branch\.(.*)', r'local_net.\1'),
    (r'global_branch\.conv1\.(.*)', r'global_net.conv_large.proj.0.\1'),
    (r'global_branch\.bn1\.(.*)', r'global_net.conv_large.proj.1.\1'),
    (r'global_branch\.conv2\.(.*)', r'global_net.conv_large.proj.3.\1'),
    (r'global_branch\.bn2\.(.*)', r'global_net.conv_large.proj.4.\1'),
    (r'global_branch\.position\.(.*)', r'global_net.generator.pos_embed.\1'),
    (r'global_branch\.attn\.queries', r'global_net.generator.attn.q'),
    (r'global_branch\.(attn|norm.)\.(.*)', r'global_net.generator.\1.\2'),
    (r'global_branch\.(fc.*)', r'global_net.generator.mlp.\1'),
    (r'global_branch\.gamma\.(.*)', r'global_net.gamma_linear.\1'),
    (r'global_branch\.colour\.(.*)', r'global_net.color_linear.\1'),
    (r'global_branch\.colour_base', r'global_net.color_base'),
    (r'global_branch\.gamma_base', r'global_net.gamma_base'),
]
SHAPES = {'alpha': (1, 1, 16), 'beta': (1, 1, 16), 'gamma_1': (1, 16, 1, 1), 'gamma_2': (1, 16, 1, 1), 'q': (1, 10, 64)}


def released(path):
    """Writes a file in the authors' layout; returns our model with these weights."""
    model = trained('LN', torch.float32)
    weights = {}
    for name, value in model.state_dict().items():
        theirs = next(re.sub(ours, new, name) for ours, new in THEIRS if re.fullmatch(ours, name))
        weights[theirs] = value.reshape(SHAPES.get(theirs.rpartition('.')[2], value.shape))
    assert len(weights) == 161
    torch.save(weights, path)
    return model


def test_the_names_are_the_authors(tmp_path):
    released(tmp_path / 'a.pth')
    weights = torch.load(tmp_path / 'a.pth')
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    for name, shape in {
            'local_net.conv1.weight': (16, 3, 3, 3), 'local_net.mul_blocks.2.mlp.fc2.bias': (16, ),
            'local_net.add_blocks.0.norm1.color': (16, 16), 'local_net.add_blocks.0.attn.weight': (16, 1, 5, 5),
            'local_net.add_end.0.bias': (3, ), 'global_net.conv_large.proj.4.running_var': (64, ),
            'global_net.generator.mlp.fc1.weight': (256, 64), 'global_net.generator.norm2.weight': (64, ),
            'global_net.generator.attn.q': (1, 10, 64), 'global_net.gamma_base': (1, ),
            'global_net.color_linear.weight': (1, 64), 'global_net.color_base': (3, 3)}.items():
        assert shapes[name] == shape


@pytest.mark.parametrize('make', [IAT, lambda norm_cfg: ImageEnhancer(dict(type='IAT', norm_cfg=norm_cfg))])
def test_all_weights_load(make, tmp_path):
    source, x = released(tmp_path / 'a.pth'), images(2, 3, 21, 34, dtype=torch.float32)
    model = make(dict(type='LN'))
    load_weights(model, str(tmp_path / 'a.pth'))
    assert torch.equal(getattr(model, 'backbone', model).eval()(x), source(x))


def test_a_config_with_un_says_what_to_do(tmp_path):
    released(tmp_path / 'a.pth')
    with pytest.raises(PreflightError, match=r'statistics of backbone\.global_branch\.norm1.*--norm LN'):
        load_weights(ImageEnhancer(dict(type='IAT')), str(tmp_path / 'a.pth'))


@pytest.mark.parametrize('part', ['backbone', 'enhancer'])
@pytest.mark.parametrize('prefix', [None, 'backbone.'])
def test_a_part_starts_from_them(part, prefix, tmp_path):
    source, init_cfg = released(tmp_path / 'a.pth'), dict(type='Pretrained', checkpoint=str(tmp_path / 'a.pth'))
    iat = dict(type='IAT', norm_cfg=dict(type='LN'), init_cfg={**init_cfg, **(dict(prefix=prefix) if prefix else {})})
    cfg = Config(dict(model={'type': 'Any', part: iat}, work_dir=str(tmp_path / 'w')))
    fit_pretrained(cfg)
    model = MODELS.build(cfg.model[part])
    model.init_weights()
    torch.testing.assert_close(model.state_dict(), source.state_dict(), rtol=0, atol=0)


def test_an_enhancer_starts_from_the_part_of_a_detector(tmp_path):
    """Names of our model after a prefix that only the config has: the file is used as it is."""
    prefix, path = 'data_preprocessor.enhancer.', str(tmp_path / 'a.pth')
    torch.save(dict(state_dict={prefix + name: value for name, value in trained().state_dict().items()}), path)
    iat = dict(type='IAT', init_cfg=dict(type='Pretrained', checkpoint=path, prefix=prefix))
    cfg = Config(dict(model=dict(type='Any', enhancer=iat), work_dir=str(tmp_path / 'w')))
    fit_pretrained(cfg)
    assert cfg.model.enhancer.init_cfg.checkpoint == path
    torch.save({'conv.weight': torch.ones(3, 3)}, path)
    with pytest.raises(PreflightError, match='does not fit the config: no weight has a name and shape'):
        fit_pretrained(cfg)


def test_a_whole_model_starts_from_them(tmp_path):
    source = released(tmp_path / 'a.pth')
    cfg = Config.fromfile(LN_CONFIG)
    cfg.load_from, cfg.work_dir = str(tmp_path / 'a.pth'), str(tmp_path / 'w')
    fit_load_from(cfg)
    model = build_model(cfg)
    load_weights(model, cfg.load_from)
    torch.testing.assert_close(model.backbone.state_dict(), source.state_dict(), rtol=0, atol=0)


def test_the_tools_take_them_without_any_pairs(in_a_folder, tmp_path, capsys):
    released('a.pth')
    (tmp_path / 'mine').mkdir()
    for i in range(4):
        image = np.random.default_rng(i).integers(0, 60, (16 + 4 * i, 21, 3), np.uint8)
        cv2.imwrite(f'mine/{i}.png', image)
    tiny_runs.call('infer', LN_CONFIG, 'a.pth', 'mine', '--out-dir', 'drawn', '--device', 'cpu')
    report, _ = tiny_runs.call('convert_norms', LN_CONFIG, 'a.pth', '--out', 'out', '--images', 'mine', '--device',
                               'cpu', '--adapt-steps', '6')
    assert len(report.converted) == 2 and 'end to end: all tokens' in capsys.readouterr().out
    original, other = ('--original', LN_CONFIG, 'a.pth'), ('--other', 'out/iat_un_lol_v1.py', 'out/iat_un_lol_v1.pth')
    tiny_runs.call('low_light:compare_enhancers', *original, *other, 'mine', '--device', 'cpu')
    mean, worst = re.search(r'4 images: PSNR ([0-9.]+) dB, worst ([0-9.]+) dB, mine/', capsys.readouterr().out).groups()
    assert 30 < float(worst) <= float(mean) < 120
    error = tiny_runs.error_of(capsys, 'low_light:compare_enhancers', *original, *other, 'out', '--device', 'cpu')
    assert 'there is no image in out' in error


def test_the_released_networks_are_converted_and_measured(in_a_folder, tmp_path, capsys):
    released('a.pth')
    for split in ('train', 'test'):
        (tmp_path / 'crops' / split).mkdir(parents=True)
        for i in range(8):
            image = np.random.default_rng(i).integers(0, 256, (40, 40, 3), np.uint8)
            cv2.imwrite(f'crops/{split}/{i}.png', image)
    call = ('low_light:convert_released', 'a.pth', '--crops', 'crops', '--size', '24', '--out', 'out')
    tiny_runs.call(*call, '--steps', '5')
    ways = re.findall(r'\| a.pth \| (.*?) \| ([0-9.]+) \|', capsys.readouterr().out)
    assert [way for way, _ in ways] == ['converted', 'and adapted'] and float(ways[1][1]) > 30
    model = IAT(norm_cfg=dict(type='UN'))
    load_weights(model, 'out/a_un.pth')
    tiny_runs.call(*call, '--steps', '0', '--keep', 'norm1')
    printed = capsys.readouterr().out
    assert '| a.pth | converted |' in printed and 'adapted' not in printed
    assert 'there is no image in' in tiny_runs.error_of(capsys, *call, '--crops', 'out')
