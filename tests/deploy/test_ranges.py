"""Ranges of INT8 in LiteRT: independent of the order of images, and chosen on images held out."""
import numpy as np
import pytest
import torch
from torch import nn

for package in ('litert_torch', 'ai_edge_quantizer', 'ai_edge_litert'):
    pytest.importorskip(package)

from mmunorm import compare, export
from mmunorm.deploy.formats.base import silent
from mmunorm.deploy.formats.litert import NAME, programs_of, write_float
from mmunorm.deploy.ranges import CHOICES, Extremes
from mmunorm.deploy.torch_models import as_exportable


@pytest.fixture(scope='module')
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)).eval()


def images(number=16):
    return torch.randn(number, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_extremes(model, tmp_path):
    exportable, x = as_exportable(model, images(1)), images()
    x[0] *= 10
    with silent():
        write_float(programs_of(exportable), tmp_path / 'm.tflite', exportable.meta)
    runs = [dict(images=image[None]) for image in x.permute(0, 2, 3, 1).contiguous().numpy()]
    extremes, backwards = (Extremes(tmp_path / 'm.tflite', {NAME: order}) for order in (runs, runs[::-1]))
    for choice in CHOICES:
        found, same = extremes.ranges(choice), backwards.ranges(choice)
        for name, limits in found.items():
            np.testing.assert_allclose(*([row['min'], row['max']] for row in (limits, same[name])), rtol=1e-6)
    whole, most, mean = (extremes.ranges(choice)[f'{NAME}_images'] for choice in CHOICES)
    assert mean['max'] < most['max'] < whole['max'] and whole['min'] < most['min'] < mean['min']
    assert whole['max'].shape == (1, 1, 1, 1) and whole['max'].item() == x.max() and whole['min'].item() == x.min()
    assert mean['max'].item() == pytest.approx(x.amax((1, 2, 3)).mean().item(), rel=1e-5)
    left = extremes.ranges('least to greatest value', 8)[f'{NAME}_images']
    assert left['max'].item() == x[[index for index in range(16) if index % 8]].max()
    outputs = {tensor: found for tensor, found in extremes.ranges('least to greatest value').items()
               if found['min'] == 0}
    assert outputs  # those of ReLU


@pytest.mark.slow
def test_the_better_range_is_chosen(model, tmp_path):
    """One image is 100 times as bright: with its range, the others would have 3 of 255 steps."""
    x = images(24)
    for scale, least in (1, 30), (100, 20):
        bright = x.clone()
        bright[3] *= scale
        export(model, x[:1], tmp_path / 'm.tflite', int8='full', calibration=bright)
        assert compare(tmp_path / 'm.tflite', model, x[:3]).snr['output'] > least
