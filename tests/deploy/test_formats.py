import pytest
import torch

from mmunorm.deploy import formats
from mmunorm.utils import PreflightError


@pytest.fixture(autouse=True)
def _a_torch_that_exports(monkeypatch):
    monkeypatch.setattr(torch, '__version__', '2.9.0')


@pytest.mark.parametrize('name, expected', [('onx', 'did you mean onnx?'), ('OpenVINO', 'did you mean openvino?'),
                                            ('zzz', "one of onnx, openvino, got 'zzz'")])
def test_a_mistyped_format_gets_the_nearest(name, expected):
    with pytest.raises(PreflightError) as error:
        formats.find_format(name)
    assert expected in str(error.value)


def test_every_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(formats, 'find_spec', lambda name: None if name.startswith('onnx') else True)
    with pytest.raises(PreflightError, match=r"^missing: onnx, onnxscript; get it with pip install -e '\.\[deploy\]'$"):
        formats.find_format('openvino')


def test_int8_needs_a_package_more(monkeypatch):
    monkeypatch.setattr(formats, 'find_spec', lambda name: None if name == 'nncf' else True)
    with pytest.raises(PreflightError, match='^missing: nncf;'):
        formats.find_format('openvino', int8=True)
    assert formats.find_format('openvino').name == 'openvino'
    assert formats.find_format('onnx', int8=True).name == 'onnx'


def test_torch_is_too_old(monkeypatch):
    monkeypatch.setattr(formats, 'find_spec', lambda name: True)
    monkeypatch.setattr(torch, '__version__', '2.8.1+cpu')
    with pytest.raises(PreflightError, match=r'^the exporter needs torch 2.9 or newer, and this Python has 2.8.1\+cpu'):
        formats.find_format('onnx')


def test_the_table():
    lines = formats.table().splitlines()
    assert len(lines) == 1 + len(formats.FORMATS)
    assert lines[2].split() == ['openvino', '.xml', 'OpenVINO']
