import pytest
import torch

from mmunorm.deploy import formats
from mmunorm.errors import PreflightError


@pytest.fixture(autouse=True)
def _a_torch_that_exports(monkeypatch):
    monkeypatch.setattr(torch, '__version__', '2.9.0')


@pytest.mark.parametrize('name, expected', [('onx', 'did you mean onnx?'), ('OpenVINO', 'did you mean openvino?'),
                                            ('zzz', "one of onnx, openvino, tensorrt, got 'zzz'")])
def test_a_mistyped_format_gets_the_nearest(name, expected):
    with pytest.raises(PreflightError) as error:
        formats.find_format(name)
    assert expected in str(error.value)


def test_a_flag_that_a_format_lacks():
    with pytest.raises(PreflightError, match='--dynamic does not go with --format tensorrt; it does with onnx'):
        formats.find_format('tensorrt', ('half', 'dynamic'))


def test_tensorrt_needs_a_gpu_and_its_package(monkeypatch):
    monkeypatch.setattr(formats, 'find_spec', lambda name: None if name == 'tensorrt' else True)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(PreflightError, match='--format tensorrt needs an NVIDIA GPU'):
        formats.find_format('tensorrt')
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    with pytest.raises(PreflightError, match=r"^missing: tensorrt; get it with pip install -e '.*' tensorrt$"):
        formats.find_format('tensorrt')


def test_every_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(formats, 'find_spec', lambda name: None if name.startswith('onnx') else True)
    with pytest.raises(PreflightError, match=r"^missing: onnx, onnxscript; get it with pip install -e '\.\[deploy\]'$"):
        formats.find_format('openvino')


def test_int8_needs_a_package_more(monkeypatch):
    monkeypatch.setattr(formats, 'find_spec', lambda name: None if name == 'nncf' else True)
    with pytest.raises(PreflightError, match='^missing: nncf;'):
        formats.find_format('openvino', ('int8', ))
    assert formats.find_format('openvino').name == 'openvino'
    assert formats.find_format('onnx', ('int8', )).name == 'onnx'


def test_torch_is_too_old(monkeypatch):
    monkeypatch.setattr(formats, 'find_spec', lambda name: True)
    monkeypatch.setattr(torch, '__version__', '2.8.1+cpu')
    with pytest.raises(PreflightError, match=r'^the exporter needs torch 2.9 or newer, and this Python has 2.8.1\+cpu'):
        formats.find_format('onnx')


def test_the_table():
    lines = formats.table().splitlines()
    assert len(lines) == 1 + len(formats.FORMATS)
    assert lines[2].split() == ['openvino', '.xml', 'CPU', '--half', '--int8', '--dynamic']
