"""The norms, their conversion and their folding, where torch and timm are installed and nothing of OpenMMLab."""
import os
import re
import subprocess
import sys

import pytest

from .tiny_runs import ROOT

README = (ROOT / 'README.md').read_text()

# An import of these packages fails, as where they are not installed.
BLOCKED = 'import sys\nsys.modules.update(dict.fromkeys({packages}))\n'
OPENMMLAB = ('mmengine', 'mmcv', 'mmdet', 'mmpretrain')
INSTALL = ', which is not installed. If other OpenMMLab packages are installed, use the same '


def run(code: str, packages: tuple[str, ...] = OPENMMLAB, folder=None) -> subprocess.CompletedProcess:
    """Runs code in a process of its own, in which these packages are missing."""
    return subprocess.run([sys.executable, '-c', BLOCKED.format(packages=packages) + code], capture_output=True,
                          text=True, cwd=folder)


# A model of timm with one block and few channels, in place of the one of the first page.
SMALLER = """
import functools, timm
timm.create_model = functools.partial(timm.create_model, depths=(1, ), num_heads=(3, ), embed_dim=24)
"""


@pytest.mark.slow
def test_the_lines_of_the_first_page(tmp_path):
    for package in ('timm', 'litert_torch'):
        pytest.importorskip(package)
    block = next(block for block in re.findall(r'```python\n(.*?)```', README, flags=re.S) if 'timm' in block)
    code = f'{SMALLER}{block}\nprint(*(name for name in {OPENMMLAB} if sys.modules[name]))'
    done = run(code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / 'swin_t.tflite').exists()
    *lines, imported = done.stdout.splitlines()
    assert not imported
    assert {'folded: 4 norms: 3 are now norms without weights, 1 without weights, and a linear layer',
            'norms left: 4, 4 of them without weights'} <= set(lines)


@pytest.mark.slow
def test_an_mmpretrain_that_cannot_be_imported_counts_as_missing(tmp_path):
    """Such as beside transformers 5."""
    (tmp_path / 'mmpretrain').mkdir()
    (tmp_path / 'mmpretrain/__init__.py').write_text("raise TypeError('cannot import name X from transformers')")
    code = ('import torch, mmunorm; from torch import nn; '
            'model = nn.Sequential(mmunorm.UN(4), nn.Linear(4, 2)).eval(); '
            'print(mmunorm.fuse_norms(model, strict=True, example=torch.randn(1, 4)))')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, 'PYTHONPATH': os.pathsep.join([str(tmp_path), str(ROOT)])})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('1 norm: 1 folded\n')
    assert 'mmpretrain, which cannot be imported here: cannot import name X from transformers' in done.stderr


def test_norms_are_replaced_and_train_and_what_needs_openmmlab_says_so():
    done = run('''
import torch, mmunorm, mmunorm.benchmark.measure

model = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.nn.Linear(8, 2))
mmunorm.replace_norms(model, dict(type='UN', window=2, warmup_iters=1))
for _ in range(3):
    model(torch.randn(4, 5, 8)).square().mean().backward()
print(type(model[0].norm1).__name__, model[0].norm1.num_batches_tracked.item())
model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
report = mmunorm.convert_norms(model, torch.randn(64, 8))
print(len(report.converted), mmunorm.fuse_norms(model.eval(), strict=True, example=torch.randn(2, 8)))
try:
    mmunorm.replace_norms(torch.nn.LayerNorm(8), dict(type='XN'))
except KeyError as error:
    print(error.args[0])
print(isinstance(mmunorm.replace_norms(torch.nn.LayerNorm(8), dict(type=mmunorm.UN)), mmunorm.UN))
for code in ('mmunorm.engine.OfflineNormHook', 'from mmunorm.cli import training', 'mmunorm.nothing',
             'from mmunorm.__main__ import main; main(["train", "mine.py"])'):
    try:
        exec(code)
    except (AttributeError, ImportError, SystemExit) as error:
        print(error)
''')
    assert done.returncode == 0, done.stderr
    trained, converted, *_, unknown, by_class, first, second, wrong, tool = done.stdout.splitlines()
    assert trained == 'UN 3' and converted == '1 1 norm: 1 folded' and by_class == 'True'
    assert unknown.startswith("norm_cfg: there is no norm 'XN'") and ' mmunorm has Derf, DyT, MABN, ' in unknown
    for line, what in ((first, 'mmunorm.engine'), (second, 'each tool of mmunorm'), (tool, 'mmunorm train')):
        assert line.startswith(f'{what} needs mmengine, mmcv, mmdet, mmpretrain{INSTALL}')
    assert wrong == "module 'mmunorm' has no attribute 'nothing'"


@pytest.mark.slow
def test_with_mmengine_alone_a_folded_checkpoint_is_saved_and_loaded(tmp_path):
    """The last line of an error says what the rest needs, such as a tool of a clone."""
    pytest.importorskip('timm')
    done = run(f'''
import runpy
import torch
try:
    runpy.run_path({str(ROOT / 'tools/test.py')!r}, run_name='__main__')
except ImportError as error:
    print(error)
import mmunorm
import timm
from mmengine.registry import HOOKS, MODELS

print(MODELS.get('UN') is mmunorm.UN, HOOKS.get('FuseNormsHook') is not None, HOOKS.get('OfflineNormHook'))
model = mmunorm.replace_norms(timm.create_model('test_vit'), dict(type='UN')).eval()
mmunorm.fuse_norms(model, strict=True)
mmunorm.save_folded(model, {str(tmp_path / 'folded.pth')!r})
image = torch.randn(1, 3, 160, 160)
loaded = mmunorm.load_folded({str(tmp_path / 'folded.pth')!r}, timm.create_model('test_vit'))
print(torch.equal(loaded(image), model(image)))
''', packages=OPENMMLAB[1:])
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if 'WARNING' not in line]  # mmengine's, of its own names
    assert lines[0].startswith(f'each tool of mmunorm needs mmcv, mmdet, mmpretrain{INSTALL}')
    assert lines[1:] == ['True True None', 'True']
    warning = 'mmunorm provides its norms and the functions of models; the rest needs mmcv, mmdet, mmpretrain'
    assert warning in done.stderr
