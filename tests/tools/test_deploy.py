"""tools/deploy on tiny data: from a checkpoint to a file, its metrics, its drawings, and its speed beside others."""
import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config

from mmunorm.benchmark import files
from mmunorm.benchmark.subjects import Subject
from mmunorm.deploy import FORMATS
from mmunorm.deploy.graph import norms_left
from mmunorm.utils import PreflightError

from .. import processes, tiny_runs

for package in ('onnx', 'onnxscript', 'onnxruntime', 'openvino'):
    pytest.importorskip(package)

EXPORT, TEST, INFER, BENCHMARK = (tiny_runs.load_tool(f'deploy/{name}') for name in (
    'export', 'test', 'infer', 'benchmark'))
MEASURED = ['openvino', 'onnx', 'onnx-int8']
LN = 'swin_ln_tiny'


@pytest.fixture(scope='module')
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp('classifier')
    config, checkpoint, data = tiny_runs.untrained_classifier(folder, stages=1)
    content = torch.load(checkpoint, weights_only=False)
    for name, value in content['state_dict'].items():
        if name.startswith('head') or name.endswith('running_var'):
            value.copy_(torch.rand(value.shape) + 0.2)
    torch.save(content, checkpoint)
    return config, checkpoint, data


@pytest.mark.slow
def test_a_classifier(classifier, tmp_path, capsys):
    config, checkpoint, data = classifier
    expected = tiny_runs.call(tiny_runs.load_tool('test'), config, checkpoint, '--work-dir', tmp_path / 'w')
    capsys.readouterr()
    exported = tiny_runs.call(EXPORT, config, checkpoint, '--format', 'openvino', '--out', tmp_path / 'model')
    printed = capsys.readouterr().out
    assert 'norms left: 0' in printed and 'compared with torch on 1 image of noise: SNR of scores ' in printed
    assert 'takes: 1 image of 32 x 32 pixels' in printed
    assert f'tools/deploy/infer.py {exported.path}' in printed and ' MB\n' in printed
    assert tiny_runs.call(TEST, config, exported.path, '--work-dir', tmp_path / 'tested') == expected
    cfg = Config.fromfile(config)
    cfg.test_dataloader.dataset.update(metainfo=dict(classes=('a', 'b', 'c')), with_label=False)
    cfg.model.head.num_classes = 3
    cfg.dump(tmp_path / 'three.py')
    assert 'the file has 2 classes, and the data set has 3' in tiny_runs.error_of(
        capsys, TEST, tmp_path / 'three.py', exported.path)
    written, = (tmp_path / 'tested').glob('*/*.json')
    assert json.loads(written.read_text()) == expected
    tiny_runs.call(INFER, exported.path, data, '--out-dir', tmp_path / 'drawn')
    drawn = sorted((tmp_path / 'drawn').rglob('*.png'))
    assert len(drawn) == 4 and cv2.imread(str(drawn[0])).shape == (512, 512, 3)


@pytest.mark.slow
def test_int8_with_the_weights_of_layer_norms_folded(classifier, capsys):
    config, checkpoint = tiny_runs.ln_twin(classifier[0])
    file = tiny_runs.call(EXPORT, config, checkpoint, '--format', 'onnx', '--int8', '--batch', '2', '--num-samples',
                          '4')
    printed = capsys.readouterr().out
    assert file.path == checkpoint.with_name('ln_int8.onnx') and (file.norms, file.plain) == (0, 4)
    assert 'folded: 4 norms: ' in printed and 'norms left: 4, 4 of them without weights\n' in printed
    assert 'accuracy/top1' in tiny_runs.call(TEST, config, file.path)


def test_where_the_file_goes():
    for text, expected in ((None, 'runs/epoch_8.xml'), ('runs/v1.2', 'runs/v1.2.xml'), ('runs/v1.xml', 'runs/v1.xml')):
        assert EXPORT.file_of(text, Path('runs/epoch_8.pth'), FORMATS['openvino'], None) == Path(expected)
    for name, kind, expected in (('onnx', 'static', 'a_int8.onnx'), ('onnx', 'external', 'a_external.onnx'),
                                 ('litert', 'full', 'a_int8_full.tflite'), ('qnn', 'static', 'a_int8.qnn.onnx')):
        assert EXPORT.file_of(None, Path('a.pth'), FORMATS[name], kind) == Path(expected)
    with pytest.raises(PreflightError, match='a.onnx has the suffix of another format: this one has .xml'):
        EXPORT.file_of('a.onnx', Path('b.pth'), FORMATS['openvino'], None)
    with pytest.raises(PreflightError, match='a.qnn.onnx has the suffix of another format: this one has .onnx'):
        EXPORT.file_of('a.qnn.onnx', Path('b.pth'), FORMATS['onnx'], None)
    with pytest.raises(PreflightError, match='overwrite the checkpoint m.bin'):
        EXPORT.file_of('m', Path('m.bin'), FORMATS['openvino'], None)


@pytest.mark.slow
def test_rows_and_ratios(classifier, tmp_path, capsys, monkeypatch):
    processes.start()
    left = {}

    def lacks(subject, name, export=Subject.export):
        left[subject.name] = tuple(map(len, norms_left(subject.exportable.graph)))
        if name == 'openvino':
            raise PreflightError('no OpenVINO here')
        return export(subject, name)

    monkeypatch.setattr(Subject, 'export', lacks)
    result = tiny_runs.call(BENCHMARK, *classifier[:2], '--baseline', *tiny_runs.ln_twin(classifier[0]), '--batch', '3',
                            '--repeat', '2', '--formats', *MEASURED, '--num-samples', '3', '--threads', '1', '--out',
                            tmp_path / 'out')
    printed = capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == ['formats.json', 'formats.md']
    text = (tmp_path / 'out/formats.md').read_text()
    assert text in printed and '| x swin_ln_tiny |' in text and 'Batches of 3, 32 x 32 pixels' in text
    _, row, *_ = json.loads((tmp_path / 'out/formats.json').read_text())['rows']
    assert row['error'] is None and row['seconds']
    assert [(row['model'], row['format']) for row in result['rows']] == [
        (model, name) for model in (LN, f'{LN} (exact)', 'classifier') for name in MEASURED]
    for row in result['rows']:
        if row['format'] == 'openvino':
            assert row['error'] == 'no OpenVINO here' and '| OpenVINO | no OpenVINO here | - |' in text
            continue
        assert 'accuracy/top1' in row['metrics'] and len(row['seconds']) == 2 and row['size'] > 10_000
        base = next(other for other in result['rows'] if other['format'] == row['format'])
        assert ('to_baseline' in row) == (row is not base)
        if row is not base:
            assert row['to_baseline']['value'] == pytest.approx(
                np.median(np.divide(base['seconds'], row['seconds'])))
    assert left == {LN: (4, 0), f'{LN} (exact)': (0, 4), 'classifier': (0, 0)}
    control = result['control']  # the last row, and once more
    assert (control['model'], control['label']) == ('classifier', 'ONNX Runtime INT8') and control['ratio']['value'] > 0
    assert 'Control: classifier, ONNX Runtime INT8 in two rows' in text


def test_which_metrics_the_table_shows():
    both = {'coco/bbox_mAP': 0.5, 'coco/bbox_mAP_50': 0.7, 'coco/segm_mAP': 0.4}
    assert files.main_metrics(both) == {'coco/bbox_mAP': 0.5, 'coco/segm_mAP': 0.4}
    assert files.main_metrics({'accuracy/top1': 80., 'accuracy/top5': 90.}) == {'accuracy/top1': 80.}
