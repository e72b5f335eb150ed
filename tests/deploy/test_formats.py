import pytest

from mmunorm.deploy import formats
from mmunorm.errors import PreflightError


@pytest.mark.parametrize('name, expected', [('onx', 'did you mean onnx?'), ('OpenVINO', 'did you mean openvino?'),
                                            ('zzz', "one of onnx, openvino, got 'zzz'")])
def test_a_mistyped_format_gets_the_nearest(name, expected):
    with pytest.raises(PreflightError) as error:
        formats.find_format(name)
    assert expected in str(error.value)


def test_a_flag_that_a_format_lacks(monkeypatch):
    monkeypatch.setattr(formats, 'find_spec', lambda name: True)
    with pytest.raises(PreflightError, match='--half does not go with --format onnx; it does with openvino'):
        formats.find_format('onnx', ('half', ))


def test_every_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(formats, 'find_spec', lambda name: None if name.startswith('onnx') else True)
    with pytest.raises(PreflightError, match=r"^missing: onnx, onnxscript; get it with pip install -e '\.\[deploy\]'$"):
        formats.find_format('openvino')


def test_the_table():
    lines = formats.table().splitlines()
    assert len(lines) == 1 + len(formats.FORMATS)
    assert lines[2].split() == ['openvino', '.xml', 'CPU', '--half']
