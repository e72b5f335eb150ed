"""Two files of one model beside each other."""
import pytest
import torch
from torch import nn

from mmunorm import export
from mmunorm.benchmark.exported import compare_files
from mmunorm.deploy import FORMATS
from mmunorm.utils import PreflightError


def test_a_table_of_files(tmp_path):
    try:
        FORMATS['onnx'].check('')
    except PreflightError as error:
        pytest.skip(str(error))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.Flatten(), nn.Linear(36, 4)).eval()
    images = torch.randn(4, 3, 24, 24)
    export(model, images[:1], tmp_path / 'float.onnx')
    export(model, images[:1], tmp_path / 'int8.onnx', 'static', images)
    files = {'float': tmp_path / 'float.onnx', 'INT8': tmp_path / 'int8.onnx'}
    header, _, first, second = compare_files(files, model, iter(images.split(2)), rounds=3).splitlines()
    assert header == '| file | ms | x float | SNR, dB | MB |'
    assert first.startswith('| float | ') and '|  |' in first
    _, name, ms, faster, snr, size, _ = (cell.strip() for cell in second.split('|'))
    assert name == 'INT8' and float(ms) > 0 and float(faster) > 0 and float(snr) > 20 and float(size) >= 0
