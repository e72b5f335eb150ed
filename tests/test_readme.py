"""The configs that the README tells a user to write."""
import re
from pathlib import Path

import mmdet
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from mmunorm.config.models import build_model
from mmunorm.norms import UN

from . import processes, tiny_runs
from .tiny_runs import ROOT

README = (ROOT / 'README.md').read_text()
BLOCKS = [re.sub(r'^   ', '', block, flags=re.M)
          for block in re.findall(r'```python\n(.*?)```', README, flags=re.S)]


def load(text, folder, name):
    """The config as if it lay in configs/, which it is not written into."""
    path = folder / name
    path.write_text(text.replace("'./swin", f"'{ROOT}/configs/swin"))
    return Config.fromfile(path)


def norms_of(model):
    return [module for module in model.modules() if isinstance(module, (UN, nn.LayerNorm))]


def test_own_coco_data(tmp_path):
    own_data = load(next(block for block in BLOCKS if 'bolt' in block), tmp_path, 'mine.py')
    assert own_data.train_dataloader.dataset.data_root == 'data/mine/'
    assert own_data.train_dataloader.dataset.metainfo.classes == ('bolt', 'nut')
    assert own_data.test_dataloader.dataset.ann_file == 'val.json'
    assert own_data.test_evaluator.ann_file == 'data/mine/val.json'
    assert len(own_data.train_dataloader.dataset.pipeline) > 3
    own_data.model.backbone.init_cfg = None
    model = build_model(own_data)
    assert {norm.warmup_iters for norm in norms_of(model)} == {500}
    assert model.roi_head.bbox_head.num_classes == model.roi_head.mask_head.num_classes == 2


def stock_config(folder):
    """mmdet's own Swin, which hands `norm_cfg` to every norm."""
    return load(next(block for block in BLOCKS if 'custom_imports' in block), folder, 'stock.py')


def test_norm_cfg_in_a_stock_config(tmp_path):
    cfg = stock_config(tmp_path)
    assert cfg.model.backbone.type == 'SwinTransformer'
    norms = norms_of(build_model(cfg))
    assert len(norms) == 32 and {type(norm) for norm in norms} == {UN}


@pytest.mark.slow
def test_it_trains_with_mmdets_own_tool(tmp_path, monkeypatch):
    """The file word for word, with small images and few channels, from weights of LayerNorm."""
    monkeypatch.chdir(tmp_path)
    cfg = stock_config(tmp_path)
    # The stock tools ask for workers that persist.
    options = [option.replace('num_workers=0', 'num_workers=1')
               for option in tiny_runs.tiny_data(cfg, tmp_path / 'data/coco')]
    init_default_scope(cfg.default_scope)
    ln = {**cfg.model.backbone, 'embed_dims': 12, 'norm_cfg': dict(type='LN'), 'init_cfg': None}
    weights = MODELS.build(ln).state_dict()
    torch.save(dict(state_dict={f'backbone.{key}': value for key, value in weights.items()}), 'ln.pth')
    options += ['model.backbone.embed_dims=12', 'model.neck.in_channels=[12,24,48,96]', 'train_dataloader.batch_size=1',
                'model.backbone.init_cfg.checkpoint=ln.pth', 'model.backbone.convert_weights=False',
                'custom_hooks.0.adapt_steps=1']
    tool = Path(mmdet.__file__).parent / '.mim/tools/train.py'
    assert processes.run_tool(tool, 'stock.py', '--work-dir', 'w', '--cfg-options', *options) == [0]
    assert (tmp_path / 'w/conversion.md').read_text().startswith('32 of 32 LayerNorms converted')
    state = tiny_runs.checkpoint('w/epoch_1.pth')['state_dict']
    norms = [key.removesuffix('.running_var') for key in state if key.endswith('.running_var')]
    assert len(norms) == 32 and all(state[f'{norm}.num_batches_tracked'] == 2 for norm in norms)
    assert all(value.isfinite().all() for value in state.values())


def test_commands_name_what_exists():
    assert not re.search(r'@[A-Z]+@', README)
    for name in re.findall(r'`((?:swin|t2t)\w+\.py)`', README):
        assert any((ROOT / folder / name).is_file() for folder in ('configs', 'configs/digits')), name


@pytest.mark.parametrize('page', [
    str(path.relative_to(ROOT))
    for pattern in ('README.md', 'CONTRIBUTING.md', 'configs/**/*.md', 'docs/**/*.md', 'projects/**/*.md')
    for path in sorted(ROOT.glob(pattern))])
def test_links_and_paths_exist(page):
    text = (ROOT / page).read_text()
    links = [(ROOT / page).parent / link for link in re.findall(r'\]\((?!http)([^)#\s]+)', text)]
    paths = re.findall(
        r'(?<![\w/])(?:configs|tools|benchmarks|tests|docs|projects)/[\w/-]+\.(?:py|sh|png|jpg|md)\b', text)
    missing = [path for path in (*links, *(ROOT / path for path in paths)) if not path.exists()]
    assert {path.name for path in missing} <= {'mine.py'}, missing
    for path, name in re.findall(r'`(tests/[\w/]+\.py)::(\w+)`', text):
        assert f'def {name}(' in (ROOT / path).read_text(), name
