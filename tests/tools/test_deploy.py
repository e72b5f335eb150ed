"""tools/deploy on tiny data: from a checkpoint to a file, its metrics and its drawings."""
import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config

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
    for name in ('onnx', 'openvino'):
        capsys.readouterr()
        made = tiny_runs.call(EXPORT, config, checkpoint, '--format', name, '--out', tmp_path / 'model')
        printed = capsys.readouterr().out
        assert 'norms left: 0' in printed and 'largest difference to torch: scores' in printed
        assert f'tools/deploy/infer.py {made.path}' in printed and ' MB, in ' in printed
        assert tiny_runs.call(TEST, config, made.path) == expected
        tiny_runs.call(INFER, made.path, data, '--out-dir', tmp_path / name)
        drawn = sorted((tmp_path / name).rglob('*.png'))
        assert len(drawn) == 4 and cv2.imread(str(drawn[0])).shape == (536, 512, 3)


@pytest.mark.slow
def test_a_detector(tmp_path, capsys):
    config, options = tiny_runs.write_detector(tmp_path)
    cfg = Config.fromfile(config)
    checkpoint = tiny_runs.save_weights(cfg, tmp_path / 'a.pth', [f'class {i}' for i in range(80)])
    options += ['model.roi_head.mask_head.num_convs=1']
    content = torch.load(checkpoint, weights_only=False)
    content['state_dict'] = {name: value for name, value in content['state_dict'].items()
                             if not any(f'mask_head.convs.{i}.' in name for i in (1, 2, 3))}
    torch.save(content, checkpoint)
    made = tiny_runs.call(EXPORT, config, checkpoint, '--format', 'openvino', '--cfg-options', *options)
    assert made.path == tmp_path / 'a.xml' and made.norms == 0
    metrics = tiny_runs.call(TEST, config, made.path, '--cfg-options', *options)
    assert 'coco/bbox_mAP' in metrics and 'coco/segm_mAP' in metrics
    picture = np.random.default_rng(0).integers(0, 256, (300, 90, 3), np.uint8)  # shrunk to fit
    cv2.imwrite(str(tmp_path / 'b.png'), picture)
    tiny_runs.call(INFER, made.path, tmp_path / 'b.png', '--out-dir', tmp_path / 'drawn', '--score-thr', '0')
    assert not np.array_equal(cv2.imread(str(tmp_path / 'drawn/b.png')), picture)
    assert 'does not fit into' in error_of(capsys, TEST, config, made.path, '--cfg-options', *options[:-1],
                                           'test_dataloader.dataset.pipeline.1.scale=(300,200)')


def test_what_is_refused(classifier, tmp_path, capsys):
    config, checkpoint, _ = classifier
    assert 'did you mean openvino?' in error_of(capsys, EXPORT, config, checkpoint, '--format', 'openvno')
    message = error_of(capsys, EXPORT, config, checkpoint, '--format', 'onnx', '--half')
    assert '--half does not go with --format onnx' in message and 'openvino' in message
    message = error_of(capsys, EXPORT, config, checkpoint, '--format', 'onnx', '--shape', '12', '12', '--out',
                       tmp_path / 'a')
    assert 'does not take pictures of 12 x 12' in message and not (tmp_path / 'a.onnx').exists()
    assert 'no exported model' in error_of(capsys, TEST, config, tmp_path / 'none.onnx')
    (tmp_path / 'a.pth').touch()
    assert '.onnx or .xml' in error_of(capsys, TEST, config, tmp_path / 'a.pth')


def test_a_missing_runtime_is_one_line(classifier, capsys, monkeypatch):
    config, checkpoint, _ = classifier
    monkeypatch.setattr('mmunorm.deploy.formats.find_spec', lambda name: None if name == 'onnxscript' else True)
    message = error_of(capsys, EXPORT, config, checkpoint, '--format', 'onnx')
    assert message == "error: missing: onnxscript; get it with pip install -e '.[deploy]'"


def test_help_has_the_table(capsys):
    with pytest.raises(SystemExit):
        EXPORT.main(['--help'])
    assert 'openvino  .xml' in capsys.readouterr().out
