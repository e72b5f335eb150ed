"""README.md and the other pages: their commands, the Python that they show, their links."""
import argparse
import importlib.util
import re
import shlex
from functools import cache
from pathlib import Path

import mmdet
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from mmunorm import fuse_norms, save_folded
from mmunorm.config.models import build_model
from tests import processes, tiny_runs
from tests.tiny_runs import ROOT

README = (ROOT / 'README.md').read_text()
MAKEFILE = (ROOT / 'Makefile').read_text()
PAGES = ['README.md', 'CONTRIBUTING.md',
         *(str(page.relative_to(ROOT)) for folder in ('configs', 'docs', 'projects')
           for page in sorted(ROOT.glob(f'{folder}/**/*.md')))]
CONFIGS = '.', 'configs', 'projects/*/configs'
# A block that cannot be run says why: <!-- not run: REASON -->
BLOCK = re.compile(r'(?<!-->\n)^```(python|bash)\n(.*?)^```$', re.M | re.S)
# What a page's blocks take for granted.
SETUP = {
    'docs/how_to/conversion.md': """
import functools
import os
import timm
from PIL import Image
timm.create_model = functools.partial(timm.create_model, depths=(1, 1, 1, 1), embed_dim=24)  # smaller
os.mkdir('photos')
for i in range(2):
    Image.effect_noise((300, 260), 50).convert('RGB').save(f'photos/{i}.jpg')
""",
    'docs/how_to/fusion.md': """
import timm, torch
from mmunorm import replace_norms
images = torch.randn(1, 3, 32, 32)
model = replace_norms(timm.create_model('convnext_atto', num_classes=10), dict(type='UN'))
class MyDetector(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.extract_feat = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 1), torch.nn.BatchNorm2d(8))
detector = MyDetector()
""",
    'docs/how_to/scaling.md': 'import mmunorm, torch\nmodel = mmunorm.norms.UN(4)\n'}
# Words of a shell that are not ours.
OTHERS = {'cd', 'done', 'echo', 'for', 'mkdir', 'mmunorm', 'pip', 'pre-commit', 'touch', 'trtexec'}


def blocks(page, language):
    return [text for found, text in BLOCK.findall((ROOT / page).read_text()) if found == language]


def is_config(block):
    return '_base_ = ' in block


def config_block(page, word):
    return next(block for block in blocks(page, 'python') if word in block)


def load(text, folder, name):
    """The config as if it lay in configs/, which it is not written into."""
    path = folder / name
    path.write_text(re.sub(r"(?<=')\.{1,2}/(?:\.\./)*([\w/]+\.py)(?=')", lambda base: str(next(
        found for configs in CONFIGS for found in ROOT.glob(f'{configs}/{base[1]}'))), text))
    return Config.fromfile(path)


def test_own_coco_data(tmp_path):
    cfg = load(config_block('docs/how_to/train.md', 'metainfo = '), tmp_path, 'mine.py')
    assert cfg.train_dataloader.dataset.data_root == 'data/mine/coco/'
    assert cfg.test_dataloader.dataset.ann_file == 'annotations/instances_val.json'
    assert cfg.test_evaluator.ann_file == 'data/mine/coco/annotations/instances_val.json'
    assert len(cfg.train_dataloader.dataset.pipeline) > 3
    assert cfg.model.roi_head.bbox_head.num_classes == cfg.model.roi_head.mask_head.num_classes == 10


def test_own_classification_folder(tmp_path):
    cfg = load(config_block('docs/how_to/train.md', 'bolt'), tmp_path, 'mine_classes.py')
    assert cfg.train_dataloader.dataset.metainfo.classes == ('bolt', 'nut')
    assert cfg.param_scheduler[-1].end == cfg.train_cfg.max_epochs
    assert cfg.model.backbone.norm_cfg.warmup_iters == 0.1


@pytest.mark.slow
def test_it_trains_with_mmdets_own_tool(tmp_path, monkeypatch):
    """The file word for word, with small images and few channels, from weights of LayerNorm."""
    monkeypatch.chdir(tmp_path)
    cfg = load(config_block('README.md', 'custom_imports'), tmp_path, 'stock.py')
    # The stock tools ask for workers that persist.
    options = [option.replace('num_workers=0', 'num_workers=1')
               for option in tiny_runs.tiny_data(cfg, tmp_path / 'data/coco')]
    init_default_scope(cfg.default_scope)
    ln = {**cfg.model.backbone, 'embed_dims': 12, 'depths': [1] * 4, 'norm_cfg': dict(type='LN'), 'init_cfg': None}
    weights = MODELS.build(ln).state_dict()
    torch.save(dict(state_dict={f'backbone.{key}': value for key, value in weights.items()}), 'ln.pth')
    options += ['model.backbone.embed_dims=12', 'model.backbone.depths=[1,1,1,1]',
                'model.neck.in_channels=[12,24,48,96]', 'train_dataloader.batch_size=1', 'train_cfg.val_interval=9',
                'model.backbone.init_cfg.checkpoint=ln.pth', 'model.backbone.convert_weights=False',
                'custom_hooks.0.adapt_steps=1']
    tool = Path(mmdet.__file__).parent / '.mim/tools/train.py'
    assert processes.run_tool(tool, 'stock.py', '--work-dir', 'w', '--cfg-options', *options) == [0]
    assert (tmp_path / 'w/conversion.md').read_text().startswith('16 of 16 LayerNorms converted')
    state = tiny_runs.checkpoint('w/epoch_1.pth')['state_dict']
    norms = [key.removesuffix('.running_var') for key in state if key.endswith('.running_var')]
    assert len(norms) == 16 and all(state[f'{norm}.num_batches_tracked'] == 2 for norm in norms)
    assert all(value.isfinite().all() for value in state.values())


@pytest.mark.parametrize('page', [page for page in PAGES if any(map(is_config, blocks(page, 'python')))])
def test_configs_load(page, tmp_path):
    for block in filter(is_config, blocks(page, 'python')):
        load(block, tmp_path, 'config.py')


def run(code, folder, monkeypatch):
    """Runs Python as a reader does, in a process of its own."""
    (folder / 'block.py').write_text(code)
    monkeypatch.chdir(folder)
    status, = processes.run_tool(folder / 'block.py', ERRORS='errors.txt')
    assert status == 0, f'{code}\n{Path("errors.txt").read_text()}'


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.nn, 'RMSNorm'), reason='the pages are for a newer torch')
@pytest.mark.parametrize('page', [page for page in PAGES if page != 'README.md'
                                  and not all(map(is_config, blocks(page, 'python')))])
def test_python_runs(page, tmp_path, monkeypatch):
    """All blocks of a page, one after the other; README's run in test_without_openmmlab.py."""
    code = [block for block in blocks(page, 'python') if not is_config(block) and 'Inferencer' not in block]
    run('\n'.join([SETUP.get(page, ''), *code]), tmp_path, monkeypatch)


@pytest.mark.slow
def test_inferencers_take_folded_models(tmp_path, monkeypatch):
    classifier = tiny_runs.write_classifier(tmp_path)
    configs = dict(detector=tiny_runs.write_detector(tmp_path)[0], classifier=classifier)
    for name, config in configs.items():
        cfg = Config.fromfile(config)
        model = build_model(cfg).eval()
        report = fuse_norms(model)
        save_folded(model, tmp_path / f'folded_{name}.pth', cfg, report, dict(dataset_meta=dict(classes=('a', 'b'))))
    for block in blocks('docs/how_to/fusion.md', 'python'):
        if 'Inferencer' in block:
            run(block, tmp_path, monkeypatch)


class _Found(BaseException):
    """Ends a script where it would read its arguments."""


@cache
def parser_of(script):
    """The parser of a script's arguments."""
    def stop(parser, *_):
        raise _Found(parser)

    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, 'parse_args', stop)
        with pytest.raises(_Found) as found:
            module.main([])
    return found.value.args[0]


def commands(page):
    """The words of each command, with the page's variables filled in and optional parts taken."""
    variables = {}
    for block in blocks(page, 'bash'):
        for line in re.sub(r'\\\n', ' ', block).splitlines():
            line = re.sub(r'\$\{?(\w+)\}?', lambda match: variables.get(match[1], match[0]), line)
            words = shlex.split(line, comments=True)
            variables.update(word.split('=', 1) for word in words[:2] if re.match(r'\w+=', word))
            while words and re.match(r'\w+=|&&', words[0]):
                words = words[1:]
            if words:
                yield [re.sub(r'^N$', '1', word.strip('[]')) for word in words if word != '...']


def unwrapped(script, words):
    """The tool that a shell script calls, with its arguments."""
    if script == 'tools/dist_train.sh':
        return 'tools/train.py', [words[0], *words[2:]]
    if script == 'tools/dist_test.sh':
        return 'tools/test.py', [*words[:2], *words[3:]]
    if script == 'tools/slurm_train.sh':
        return 'tools/train.py', [words[2], '--work-dir', *words[3:]]
    return script, words


@pytest.mark.parametrize('page', [page for page in PAGES if blocks(page, 'bash')])
def test_commands_exist(page, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / 'benchmarks')
    missing = []
    for first, *words in commands(page):
        if first == 'make':
            assert all(f'\n{word}:' in MAKEFILE for word in words if '=' not in word), words
        elif first in ('bash', 'python') and words[0] != '-m':
            words = ['cpu' if word.startswith('cuda') else word for word in words]  # no GPU here
            script, words = unwrapped(words[0].removeprefix('../../'), words[1:])
            try:
                parser_of(script).parse_args(words)
            except ModuleNotFoundError as error:
                missing.append(f'{script} needs {error.name}')
            except SystemExit:
                pytest.fail(f'{script} {shlex.join(words)}: {capsys.readouterr().err}')
        else:
            assert first in OTHERS or first == 'python', first
    if missing:  # with torch 2.1, after all other commands of the page
        pytest.skip('; '.join(missing))


@pytest.mark.parametrize('page', PAGES)
def test_links_and_paths_exist(page):
    text = (ROOT / page).read_text()
    links = [(ROOT / page).parent / link for link in re.findall(r'\]\((?!http)([^)#\s]+)', text)]
    paths = re.findall(
        r'(?<![\w/])(?:configs|tools|benchmarks|tests|docs|projects)/[\w/-]+\.(?:py|sh|png|jpg|md)\b', text)
    missing = [path for path in (*links, *(ROOT / path for path in paths)) if not path.exists()]
    # The project of add_a_project.md is the reader's to write.
    assert {path.name for path in missing} <= {'mine.py', 'mine_classes.py'} or 'add_a_project' in page, missing
    for path, name in re.findall(r'`(tests/[\w/]+\.py)::(\w+)`', text):
        assert f'def {name}(' in (ROOT / path).read_text(), name
