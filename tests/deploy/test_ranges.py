"""Ranges of INT8 in LiteRT: independent of the order of images, and chosen on images held out."""
import numpy as np
import pytest
import torch
from torch import nn

from mmunorm import compare
from mmunorm.deploy.api import as_exportable
from mmunorm.deploy.formats import litert
from mmunorm.deploy.formats.base import silent
from mmunorm.deploy.formats.litert import converted, write_float
from mmunorm.deploy.int8.ranges import CHOICES, Extremes
from mmunorm.deploy.tasks.base import SIGNATURE

from .conftest import needs, write

needs('litert')


@pytest.fixture(scope='module')
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)).eval()


@pytest.fixture(scope='module')
def exportable(model):
    """LiteRT converts it once for all tests."""
    return as_exportable(model, images(1))


def images(number=16):
    return torch.randn(number, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_extremes(exportable, tmp_path):
    x = images()
    x[0] *= 10
    with silent():
        write_float(converted(exportable, False), tmp_path / 'm.tflite', exportable.meta)
    runs = [dict(images=image[None]) for image in x.permute(0, 2, 3, 1).contiguous().numpy()]
    extremes, backwards = (Extremes(tmp_path / 'm.tflite', {SIGNATURE: order}) for order in (runs, runs[::-1]))
    for choice in CHOICES:
        found, same = extremes.ranges(choice), backwards.ranges(choice)
        for name, limits in found.items():
            np.testing.assert_allclose(*([row['min'], row['max']] for row in (limits, same[name])), rtol=1e-6)
    whole, most, mean = (extremes.ranges(choice)[f'{SIGNATURE}_images'] for choice in CHOICES)
    assert mean['max'] < most['max'] < whole['max'] and whole['min'] < most['min'] < mean['min']
    assert whole['max'].shape == (1, 1, 1, 1) and whole['max'].item() == x.max() and whole['min'].item() == x.min()
    assert mean['max'].item() == pytest.approx(x.amax((1, 2, 3)).mean().item(), rel=1e-5)
    for half in (0, 1):
        part = extremes.ranges('least to greatest value', half)[f'{SIGNATURE}_images']
        assert part['max'].item() == x[half::2].max() and part['min'].item() == x[half::2].min()
    outputs = {tensor: found for tensor, found in extremes.ranges('least to greatest value').items()
               if found['min'] == 0}
    assert outputs  # those of ReLU


@pytest.mark.slow
@pytest.mark.parametrize('clear, number', [(0, len(CHOICES) + 1), (300, 2 * len(CHOICES) + 1)])
def test_statistics_that_are_clearly_behind_are_not_tried_again(exportable, tmp_path, monkeypatch, clear, number):
    written = []
    monkeypatch.setattr(litert, 'CLEAR', clear)

    def count(*arguments, write=litert.write_quantized):
        written.append(arguments)
        return write(*arguments)

    monkeypatch.setattr(litert, 'write_quantized', count)
    write(exportable, 'litert', tmp_path, 'full', images())
    assert len(written) == number


@pytest.mark.slow
def test_the_better_range_is_chosen(model, exportable, tmp_path):
    """One image is 100 times as bright: with its range, the others would have 3 of 255 steps. Or every eighth is dark:
    with a range for these, the others would be clipped."""
    one_is_bright, some_are_dark = images(24), images(24) * torch.linspace(1, 5, 24).view(-1, 1, 1, 1)
    one_is_bright[3] *= 100
    some_are_dark[::8] *= 0.1
    for calibration, number, least in (images(24), 3, 30), (one_is_bright, 3, 20), (some_are_dark, 24, 30):
        write(exportable, 'litert', tmp_path, 'full', calibration)
        assert compare(tmp_path / 'm.tflite', model, calibration[:number]).snr['output'] > least
