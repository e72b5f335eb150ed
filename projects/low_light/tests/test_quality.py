import math

import numpy as np
import pytest
import torch

from mmunorm.utils import LocalError, PreflightError
from projects.low_light.low_light import ImageQuality


def sample(size=(16, 20), noise=0.1):
    target = torch.rand(3, *size)
    return dict(target=target, before=0.2 * target, pred=(target + noise * torch.randn(3, *size)).clamp(0, 1),
                img_path='a.png')


def test_means_over_images():
    pytest.importorskip('torchmetrics')
    metric, samples = ImageQuality(), [sample(), sample((24, 13), 0.3)]
    metric.process({}, samples)
    found = metric.compute_metrics(metric.results)
    psnr = [10 * math.log10(1 / (image['pred'] - image['target']).double().square().mean().item()) for image in samples]
    assert found['PSNR'] == pytest.approx(np.mean(psnr), rel=1e-4)
    assert found['PSNR_before'] < found['PSNR'] and 0 < found['SSIM_before'] < 1
    metric.results.clear()
    metric.process({}, [dict(sample(), **{key: torch.full((3, 16, 20), 0.5) for key in ('pred', 'target')})])
    assert metric.results[0]['SSIM'] == pytest.approx(1)


def test_too_small_images():
    pytest.importorskip('torchmetrics')
    with pytest.raises(LocalError, match='at least 6 x 6 pixels, and a.png has 9 x 5'):
        ImageQuality().process({}, [sample((5, 9))])


def test_without_torchmetrics_the_way_to_get_it_is_named(monkeypatch):
    monkeypatch.setattr('mmunorm.deploy.formats.base.find_spec', lambda name: None)
    with pytest.raises(PreflightError, match='missing: torchmetrics; install with pip install .*torchmetrics'):
        ImageQuality()
