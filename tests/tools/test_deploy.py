"""tools/deploy on tiny data: from a checkpoint to a file, its metrics and its drawings."""
import json
from pathlib import Path

import cv2
import pytest
import torch

from mmunorm.deploy import FORMATS
from mmunorm.utils import PreflightError

from .. import tiny_runs

for package in ('onnx', 'onnxscript', 'onnxruntime', 'openvino'):
    pytest.importorskip(package)

EXPORT, TEST, INFER = (tiny_runs.load_tool(f'deploy/{name}') for name in ('export', 'test', 'infer'))


def error_of(capsys, tool, *arguments):
    with pytest.raises(SystemExit) as stop:
        tiny_runs.call(tool, *arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.fixture(scope='module')
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp('classifier')
    config, checkpoint, data = tiny_runs.untrained_classifier(folder)
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
    made = tiny_runs.call(EXPORT, config, checkpoint, '--format', 'openvino', '--out', tmp_path / 'model')
    printed = capsys.readouterr().out
    assert 'norms left: 0' in printed and 'compared with torch: largest difference of scores' in printed
    assert 'takes: 1 picture of 32 x 32 pixels' in printed
    assert f'tools/deploy/infer.py {made.path}' in printed and ' MB, in ' in printed
    assert tiny_runs.call(TEST, config, made.path, '--work-dir', tmp_path / 'tested') == expected
    written, = (tmp_path / 'tested').glob('*/*.json')
    assert json.loads(written.read_text()) == expected
    tiny_runs.call(INFER, made.path, data, '--out-dir', tmp_path / 'drawn')
    drawn = sorted((tmp_path / 'drawn').rglob('*.png'))
    assert len(drawn) == 4 and cv2.imread(str(drawn[0])).shape == (536, 512, 3)


@pytest.mark.slow
def test_int8(classifier, tmp_path, capsys):
    config, checkpoint, _ = classifier
    arguments = (EXPORT, config, checkpoint, '--format', 'onnx', '--int8')
    assert '--batch 9' in error_of(capsys, *arguments, '--batch', '9')  # of four pictures
    for other in ('--half', '--dynamic'):
        assert f'{other} does not go with --int8' in error_of(capsys, *arguments, other)
    made = tiny_runs.call(*arguments, '--batch', '2', '--num-samples', '4')
    assert made.path == checkpoint.with_name(f'{checkpoint.stem}_int8.onnx') and made.norms == 0
    assert 'accuracy/top1' in tiny_runs.call(TEST, config, made.path)


def test_what_is_refused(classifier, tmp_path, capsys):
    config, checkpoint, _ = classifier
    assert 'did you mean openvino?' in error_of(capsys, EXPORT, config, checkpoint, '--format', 'openvno')
    message = error_of(capsys, EXPORT, config, checkpoint, '--format', 'onnx', '--dynamic', '--batch', '2')
    assert '--batch does not go with --dynamic' in message
    message = error_of(capsys, EXPORT, config, checkpoint, '--format', 'onnx', '--shape', '12', '12', '--out',
                       tmp_path / 'a')
    assert 'does not take pictures of 12 x 12' in message and not (tmp_path / 'a.onnx').exists()
    assert 'no exported model' in error_of(capsys, TEST, config, tmp_path / 'none.onnx')
    (tmp_path / 'a.pth').touch()
    assert '.onnx or .xml' in error_of(capsys, TEST, config, tmp_path / 'a.pth')
    (tmp_path / 'cut.onnx').write_bytes(b'onnx')
    assert 'cut.onnx cannot be loaded: ' in error_of(capsys, TEST, config, tmp_path / 'cut.onnx')
    (tmp_path / 'alone.xml').write_text('<net/>')
    assert 'needs its weights beside it' in error_of(capsys, TEST, config, tmp_path / 'alone.xml')


def test_where_the_file_goes():
    for text, expected in ((None, 'runs/epoch_8.xml'), ('runs/v1.2', 'runs/v1.2.xml'), ('runs/v1.xml', 'runs/v1.xml')):
        assert EXPORT.out_file(text, Path('runs/epoch_8.pth'), FORMATS['openvino'], None) == Path(expected)
    assert EXPORT.out_file(None, Path('a.pth'), FORMATS['onnx'], 'static') == Path('a_int8.onnx')
    with pytest.raises(PreflightError, match='a.onnx has the suffix of another format: this one has .xml'):
        EXPORT.out_file('a.onnx', Path('b.pth'), FORMATS['openvino'], None)
    with pytest.raises(PreflightError, match='overwrite the checkpoint m.bin'):
        EXPORT.out_file('m', Path('m.bin'), FORMATS['openvino'], None)
