"""Image quality: PSNR and SSIM, by torchmetrics."""
from __future__ import annotations

from collections.abc import Sequence

from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS

from mmunorm.deploy.formats.base import need
from mmunorm.utils import LocalError
from projects.paper.paper.curves import METRICS as SCALARS

SCALARS['enhancement/PSNR'] = 'PSNR (dB)'
MIN_SIDE = 6  # torchmetrics mirrors 5 pixels at the border


@METRICS.register_module()
class ImageQuality(BaseMetric):
    """PSNR in dB and SSIM of enhanced images, and of the input images, averaged over all images.

    Values are in [0, 1]. SSIM has torchmetrics' Gaussian window of 11 x 11 with sigma 1.5, over RGB. Arguments are
    `collect_device` and `prefix` of mmengine's BaseMetric.

    Raises:
        PreflightError: torchmetrics is not installed.
    """

    default_prefix = 'enhancement'

    def __init__(self, **kwargs):
        need('torchmetrics')
        super().__init__(**kwargs)

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        """Takes samples with `pred`, `before` and `target`, RGB `(3, h, w)` in [0, 1].

        Raises:
            LocalError: an image is too small for SSIM.
        """
        from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure
        for sample in data_samples:
            target = sample['target'][None]
            if min(target.shape[2:]) < MIN_SIDE:
                raise LocalError(f'SSIM needs images of at least {MIN_SIDE} x {MIN_SIDE} pixels, and '
                                 f'{sample.get("img_path", "one")} has {target.shape[3]} x {target.shape[2]}.')
            result = {}
            for suffix, image in (('', sample['pred']), ('_before', sample['before'])):
                pair = image[None].float(), target
                result[f'PSNR{suffix}'] = peak_signal_noise_ratio(*pair, data_range=1.).item()
                result[f'SSIM{suffix}'] = structural_similarity_index_measure(*pair, data_range=1.).item()
            self.results.append(result)

    def compute_metrics(self, results: list[dict]) -> dict[str, float]:
        """The means."""
        return {name: sum(result[name] for result in results) / len(results) for name in results[0]}
