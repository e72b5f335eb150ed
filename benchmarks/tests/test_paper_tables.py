"""Each command of a row of the paper's tables that trains builds its model."""
import json
import re
import shlex
from functools import cache

from mmunorm.cli.arguments import load_config
from mmunorm.config import presets
from mmunorm.config.models import build_model
from mmunorm.norms import Norm
from projects.translation.tests.test_configs import SMALL
from tests import tiny_runs

import pytest
from mmengine.registry import MODELS
from torch import nn

ROWS = (tiny_runs.ROOT / 'benchmarks/results/paper.jsonl').read_text().splitlines()
COMMANDS = sorted({row['command'] for row in map(json.loads, ROWS) if row['command'].startswith('bash')})
TRAIN = tiny_runs.load_tool('train')


@cache
def load(command):
    """The config of a command, and the arguments that go to tools/train.py."""
    bash, script, config, gpus, *options = shlex.split(command)
    assert (bash, script) == ('bash', 'tools/dist_train.sh') and gpus.isdigit()
    args = TRAIN.parse_args([str(tiny_runs.ROOT / config), *options])
    return load_config(args.config, args.cfg_options, args.norm), args


@pytest.mark.slow
@pytest.mark.parametrize('command', [command if i % 8 == 0 else pytest.param(command, marks=pytest.mark.grid)
                                     for i, command in enumerate(COMMANDS)])
def test_a_command_builds_a_model_of_its_norm(command):
    cfg, args = load(command)
    norm = args.norm or ('LN' if re.search('_ln[_.]', args.config) else 'UN')
    if 'translation' in args.config:
        cfg.model.backbone.update(vocab_size=8, arch=SMALL)
    else:
        tiny_runs.shrink(cfg)
    expected = presets.parse_preset(norm)[1]
    norms = [module for module in build_model(cfg).modules() if isinstance(module, (Norm, nn.LayerNorm))]
    assert len(norms) > 10 and {type(module) for module in norms} == {MODELS.get(expected.pop('type'))}
    assert all(getattr(module, key) == value for module in norms for key, value in expected.items())
    if 'pretrained' in cfg:
        kind = type(norms[0]).__name__
        folder = 'ln' if norm == 'LN' else 'un' if kind == 'UN' else presets.slug(norm)
        assert f'_{folder}_imagenet/epoch_300.pth' in cfg.pretrained
        assert cfg.model.backbone.init_cfg.checkpoint == cfg.pretrained
        # That config exists, under the same or another norm.
        base = re.sub(f'_{folder}_imagenet.*', '_un_imagenet.py', cfg.pretrained.split('/')[1])
        assert (tiny_runs.ROOT / 'configs' / base).is_file()


@pytest.mark.slow
@pytest.mark.parametrize('commands', [COMMANDS[::8], pytest.param(COMMANDS, marks=pytest.mark.grid)])
def test_every_command_has_its_own_work_directory(commands):
    folders = [cfg.get('work_dir') or args.config for cfg, args in map(load, commands)]
    assert len(set(folders)) == len(folders)
