"""tools/deploy/benchmark.py on a tiny classifier, beside the same with LayerNorm."""
import json

import numpy as np
import pytest
from mmengine.config import Config

from mmunorm.deploy import benchmark
from mmunorm.deploy.subjects import Subject
from mmunorm.utils import PreflightError

from .. import processes, tiny_runs

for package in ('onnx', 'onnxscript', 'onnxruntime', 'openvino'):
    pytest.importorskip(package)

FORMATS = ['torch', 'openvino-bf16', 'onnx', 'onnx-int8']
TOOL = tiny_runs.load_tool('deploy/benchmark')


@pytest.fixture(autouse=True, scope='module')
def _server():
    processes.start()


@pytest.fixture
def baseline(classifier, tmp_path):
    """The same config with LayerNorm, and untrained weights."""
    config = tmp_path / 'with_ln.py'
    config.write_text(classifier[0].read_text().replace("norm_cfg=dict(type='UN', warmup_iters=1)",
                                                        "norm_cfg=dict(type='LN')"))
    return config, tiny_runs.save_weights(Config.fromfile(config), tmp_path / 'ln.pth', ('dark', 'light'))


@pytest.mark.slow
def test_rows_and_ratios(classifier, baseline, tmp_path, capsys, monkeypatch):
    def lacks(subject, name, made=Subject.made):
        if name == 'openvino-bf16':
            raise PreflightError('no bfloat16 here')
        return made(subject, name)

    monkeypatch.setattr(Subject, 'made', lacks)
    result = tiny_runs.call(TOOL, *classifier[:2], '--baseline', *baseline, '--batch', '3', '--repeat', '2',
                            '--formats', *FORMATS, '--num-samples', '3', '--threads', '1', '--out', tmp_path / 'out')
    printed = capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == ['formats.json', 'formats.md', 'formats.png']
    text = (tmp_path / 'out/formats.md').read_text()
    assert text in printed and '| x with_ln |' in text and 'Batches of 3, 32 x 32 pixels' in text
    assert json.loads((tmp_path / 'out/formats.json').read_text())['rows'][0]['seconds']
    assert [(row['model'], row['format']) for row in result['rows']] == [
        (model, name) for model in ('with_ln', 'classifier') for name in FORMATS]
    for row in result['rows']:
        if row['format'] == 'openvino-bf16':
            assert row['error'] == 'no bfloat16 here' and '| OpenVINO bfloat16 | no bfloat16 here | - |' in text
            continue
        # The four test pictures: the runtimes see them as torch does. INT8 may break a tie of untrained scores.
        same = next(each for each in result['rows'] if each['model'] == row['model'])
        assert 'accuracy/top1' in row['metrics'] and (row['metrics'] == same['metrics'] or row['format'] == 'onnx-int8')
        assert len(row['seconds']) == 2 and row['size'] > 10_000
        base = next(each for each in result['rows'] if each['format'] == row['format'])
        assert ('to_baseline' in row) == (row is not base)
        if row is not base:
            assert row['to_baseline']['value'] == pytest.approx(np.median(base['seconds']) / np.median(row['seconds']))
        assert ('to_float' in row) == (row['format'] == 'onnx-int8')
    control = result['control']  # the last row, and once more
    assert (control['model'], control['label']) == ('classifier', 'ONNX Runtime INT8') and control['ratio']['value'] > 0
    assert 'Control: classifier, ONNX Runtime INT8 in two rows' in text


def test_which_metrics_the_table_shows():
    both = {'coco/bbox_mAP': 0.5, 'coco/bbox_mAP_50': 0.7, 'coco/segm_mAP': 0.4}
    assert benchmark.main_metrics(both) == {'coco/bbox_mAP': 0.5, 'coco/segm_mAP': 0.4}
    assert benchmark.main_metrics({'accuracy/top1': 80., 'accuracy/top5': 90.}) == {'accuracy/top1': 80.}


@pytest.mark.parametrize('high, is_slower', [(0.9, True), (1.1, False)])
def test_an_int8_file_that_is_slower_than_float_is_named(high, is_slower):
    row = dict(model='m', format='onnx-int8', label='ONNX Runtime INT8', error=None, metrics={}, size=1e6,
               throughput=dict(median=5., low=4., high=6.), latency_ms=dict(median=200.),
               to_float=dict(value=0.8, low=0.7, high=high))
    result = dict(title='m', baseline=None, batch=1, shape=[32, 32], threads=1, repeat=5, control=None, rows=[row],
                  environment=dict(cpu='a chip', instructions=['avx2'], runtimes={}, versions=dict(torch='2')))
    text = benchmark.markdown(result)
    assert 'a chip (avx2)' in text
    assert ('ONNX Runtime INT8 of m is slower than its float file**, 0.800 [0.700, 0.900]' in text) == is_slower
