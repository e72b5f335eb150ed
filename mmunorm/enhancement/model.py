"""Image-to-image models: a network of pictures, its loss, and what mmengine's Runner asks of them."""
from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.registry import MODELS
from mmengine.structures import BaseDataElement
from torch import Tensor, nn


def enhance_each(enhancer: nn.Module, pictures: Sequence[Tensor]) -> list[Tensor]:
    """Enhances pictures of any sizes in one pass, each as if it were alone.

    Args:
        enhancer (nn.Module): such as :class:`IAT`, called with a batch, and with `sizes` if they differ.
        pictures (Sequence[Tensor]): RGB `(3, h, w)` in [0, 1].

    Returns:
        list[Tensor]: of the same shapes.
    """
    shapes = [picture.shape[1:] for picture in pictures]
    height, width = (max(sides) for sides in zip(*shapes, strict=True))
    batch = torch.stack([F.pad(picture, (0, width - w, 0, height - h))
                         for picture, (h, w) in zip(pictures, shapes, strict=True)])
    if len(set(shapes)) == 1:
        return list(enhancer(batch))
    enhanced = enhancer(batch, torch.tensor(shapes, device=batch.device))
    return [picture[:, :h, :w] for picture, (h, w) in zip(enhanced, shapes, strict=True)]


@MODELS.register_module()
class PairDataPreprocessor(BaseDataPreprocessor):
    """Pictures uint8 BGR `(3, h, w)` of any sizes, and their targets, to float32 RGB in [0, 1]."""

    def forward(self, data: dict, training: bool = False) -> dict:
        """`inputs`, a list of pictures, and `data_samples` with their `target`, to the same in RGB [0, 1]."""
        data = self.cast_data(data)
        samples = data.get('data_samples')
        for sample in samples or ():
            if 'target' in sample:
                sample.target = _rgb(sample.target)
        return dict(inputs=[_rgb(picture) for picture in data['inputs']], data_samples=samples)


def _rgb(picture: Tensor) -> Tensor:
    return picture.flip(0).float() / 255


@MODELS.register_module()
class ImageEnhancer(BaseModel):
    """Makes a better picture of a picture; trained with L1 on pairs, as in arXiv 2205.14871.

    Args:
        backbone (dict): config of the network, such as `dict(type='IAT', norm_cfg=dict(type='UN'))`.
        data_preprocessor (dict, optional): defaults to `dict(type='PairDataPreprocessor')`.
        init_cfg (dict, optional): of mmengine's BaseModule. Defaults to None.
    """

    def __init__(self, backbone: dict, data_preprocessor: dict | None = None, init_cfg: dict | None = None):
        super().__init__(data_preprocessor or dict(type='PairDataPreprocessor'), init_cfg)
        self.backbone = MODELS.build(backbone)

    def forward(self, inputs: Sequence[Tensor], data_samples: Sequence[BaseDataElement] | None = None,
                mode: str = 'tensor') -> list | dict:
        """Enhances pictures.

        Args:
            inputs: RGB `(3, h, w)` in [0, 1].
            data_samples: each with its `target` of the same shape, for 'loss'. Defaults to None.
            mode: 'tensor' gives the enhanced pictures; 'loss' the mean L1 distance to the targets, in a dict;
                'predict' the data samples with `before` and `pred`, the picture and the enhanced one.

        Raises:
            ValueError: there is no such mode.
        """
        enhanced = enhance_each(self.backbone, inputs)
        if mode == 'tensor':
            return enhanced
        if mode == 'loss':
            return dict(loss=torch.stack([F.l1_loss(picture, sample.target)
                                          for picture, sample in zip(enhanced, data_samples, strict=True)]).mean())
        if mode != 'predict':
            raise ValueError(f"mode must be 'tensor', 'loss' or 'predict', got {mode!r}")
        samples = data_samples or [BaseDataElement() for _ in inputs]
        for sample, picture, better in zip(samples, inputs, enhanced, strict=True):
            sample.before, sample.pred = picture, better
        return samples
