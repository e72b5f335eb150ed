"""Whether AI Edge Quantizer still needs EXP to have another name."""
import pytest

pytest.importorskip('ai_edge_quantizer')
pytest.importorskip('litert_torch')

import litert_torch
import torch
from ai_edge_quantizer import qtyping, quantizer, recipe
from torch import nn

from mmunorm.deploy.formats.base import silent
from mmunorm.deploy.formats.litert import operators_of
from mmunorm.deploy.quantizer_exp import exp_renamed


class Exponentials(nn.Module):

    def forward(self, x):
        return x.exp() + 1


@pytest.fixture
def path(tmp_path):
    with silent():
        litert_torch.convert(Exponentials(), (torch.rand(2, 8), )).export(str(tmp_path / 'm.tflite'))
    return tmp_path / 'm.tflite'


def test_the_quantizer_does_not_know_exp():
    """If this fails, the quantizer takes EXP by itself: remove mmunorm/deploy/quantizer_exp.py."""
    assert 'EXP' not in {operator.value for operator in qtyping.TFLOperationName}


def test_exp_in_integers(path):
    x = torch.rand(2, 8).numpy()
    with silent():
        calibrator = quantizer.Quantizer(str(path), recipe.static_wi8_ai8())
        ranges = calibrator.calibrate({'serving_default': [dict(args_0=x)]})
        with exp_renamed(path):
            quantizer.Quantizer(str(path), recipe.static_wi8_ai8()).quantize(ranges).export_model(
                str(path), overwrite=True)
    assert operators_of(path)['EXP'] == 1
    assert operators_of(path, in_float=True).keys() <= {'QUANTIZE', 'DEQUANTIZE'}
