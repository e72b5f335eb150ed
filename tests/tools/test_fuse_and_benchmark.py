import json

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from mmunorm.benchmark import tasks
from mmunorm.fusion import folded_norms
from mmunorm.norms.layers import is_norm

from .. import tiny_runs

TOOL = tiny_runs.load_tool('analysis/fuse_and_benchmark')
FILES = ['benchmark.json', 'benchmark.md', 'benchmark.png']


def call(*arguments):
    return tiny_runs.call(TOOL, *arguments, '--device', 'cpu')


def error_of(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        call(*arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def classifier(tmp_path):
    return tiny_runs.write_classifier(tmp_path)


def test_classifier(classifier, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call(classifier, '--batch-size', '2', '--repeat', '2', '--shape', '40', '--warmup', '1')
    folder = tmp_path / 'work_dirs/classifier/fuse_and_benchmark'
    assert sorted(path.name for path in folder.iterdir()) == FILES
    printed = capsys.readouterr()
    text = (folder / 'benchmark.md').read_text()
    assert text in printed.out and str(folder.relative_to(tmp_path) / 'benchmark.png') in printed.out
    assert 'measuring' not in printed.err  # the bar is for terminals
    assert '| norm-free | ' in text and 'random statistics' in text and '40 x 40' in text
    result = json.loads((folder / 'benchmark.json').read_text())
    assert [row['name'] for row in result['rows']] == ['LN', 'UN', 'UN folded', 'norm-free']
    # 40 pixels are 10 tokens, which windows of 4 pad.
    assert result['rows'][2]['output_difference']['relative'] < 1e-4
    assert result['fusion']['folded'] == 7 and result['fusion']['kept'] == 0
    from PIL import Image
    with Image.open(folder / 'benchmark.png') as picture:
        assert picture.width > 1000


@pytest.mark.slow
def test_detector(tmp_path, monkeypatch):
    detector = tiny_runs.write_detector(tmp_path)[0]
    monkeypatch.setattr(tasks, 'CANDIDATES', 5)
    result = call(detector, '--repeat', '1', '--shape', '60', '90', '--out', tmp_path / 'out',
                  '--cfg-options', 'model.test_cfg.rpn.max_per_img=20', 'model.backbone.norm_cfg.window=2')
    assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == FILES
    assert result['settings']['shape'] == (60, 90) and result['settings']['batch_size'] == 1
    assert [row['norm_calls'] for row in result['rows']] == [16, 16, 0, 0]
    assert result['rows'][2]['output_difference']['relative'] < 1e-4
    assert any(note.startswith('Detections in a batch: ') for note in result['notes'])


@pytest.mark.slow
def test_a_checkpoint_is_measured_and_saved_folded(classifier, tmp_path):
    cfg = Config.fromfile(classifier)
    init_default_scope(cfg.default_scope)
    model = MODELS.build(cfg.model)
    for module in model.modules():
        if is_norm(module):
            torch.nn.init.uniform_(module.running_var, 0.5, 2)
    torch.save(dict(state_dict=model.state_dict(), meta=dict(dataset_meta=dict(classes=('a', 'b')))),
               tmp_path / 'a.pth')
    result = call(classifier, tmp_path / 'a.pth', '--repeat', '1', '--batch-size', '1', '--out',
                  tmp_path / 'out', '--save', tmp_path / 'new/folded.pth')
    assert str(tmp_path / 'a.pth') in result['notes'][0] and 'random' not in result['notes'][0]
    folded = torch.load(tmp_path / 'new/folded.pth', weights_only=False)
    assert folded_norms(folded) and folded['meta']['dataset_meta'] == dict(classes=('a', 'b'))
    qkv = 'backbone.stages.0.blocks.0.attn.w_msa.qkv.weight'
    norm = model.backbone.stages[0].blocks[0].norm1
    expected = model.state_dict()[qkv] / (norm.running_var + norm.eps).sqrt()
    torch.testing.assert_close(folded['state_dict'][qkv], expected)


def test_errors(classifier, tmp_path, capsys):
    assert 'no config file' in error_of(capsys, tmp_path / 'gone.py')
    assert 'no checkpoint' in error_of(capsys, classifier, tmp_path / 'gone.pth')
    assert '--save needs a CHECKPOINT' in error_of(capsys, classifier, '--save', 'a.pth')
    assert '--shape takes one or two numbers, got 3' in error_of(capsys, classifier, '--shape', '3', '4', '5')
    assert 'must be at least 1, got 0' in error_of(capsys, classifier, '--batch-size', '0')
    ln = tiny_runs.ROOT / 'configs/swin_t_ln_imagenet.py'
    assert 'cannot be folded' in error_of(capsys, ln)
    for device, message in (('potato', 'must be such as cpu'), ('cuda:99', 'GPUs')):
        with pytest.raises(SystemExit):
            tiny_runs.call(TOOL, classifier, '--device', device)
        assert message in capsys.readouterr().err
