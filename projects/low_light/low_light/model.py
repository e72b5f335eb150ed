"""A model that enhances images: the network, its loss, and its data preprocessor."""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.model import BaseDataPreprocessor, BaseModel, stack_batch
from mmengine.registry import MODELS
from mmengine.structures import BaseDataElement
from torch import Tensor, nn


def enhance_each(enhancer: nn.Module, images: Sequence[Tensor]) -> list[Tensor]:
    """Enhances RGB images `(3, h, w)` in [0, 1] in one pass, independently of each other, to the same shapes.

    The enhancer, such as :class:`IAT`, is called with a batch, and with `sizes` if they differ.
    """
    shapes = [image.shape[1:] for image in images]
    batch = stack_batch(list(images))
    if len(set(shapes)) == 1:
        return list(enhancer(batch))
    enhanced = enhancer(batch, torch.tensor(shapes, device=batch.device))
    return [image[:, :h, :w] for image, (h, w) in zip(enhanced, shapes, strict=True)]


@MODELS.register_module()
class PairDataPreprocessor(BaseDataPreprocessor):
    """Converts images, uint8 BGR `(3, h, w)` of any sizes, and their targets to float32 RGB in [0, 1]."""

    def forward(self, data: dict, training: bool = False) -> dict:
        """Takes and returns `inputs`, a list of images, and `data_samples`, which may have a `target`."""
        data = self.cast_data(data)
        samples = data.get('data_samples')
        for sample in samples or ():
            if 'target' in sample:
                sample.target = _rgb(sample.target)
        return dict(inputs=[_rgb(image) for image in data['inputs']], data_samples=samples)


def _rgb(image: Tensor) -> Tensor:
    return image.flip(0).float() / 255


@MODELS.register_module()
class ImageEnhancer(BaseModel):
    """Enhances images; trained with L1 on pairs, as in arXiv 2205.14871.

    Args:
        backbone (dict): config of the network, such as `dict(type='IAT', norm_cfg=dict(type='UN'))`.
        data_preprocessor, init_cfg (dict, optional): of mmengine's BaseModel, but by default a
            :class:`PairDataPreprocessor`.
    """

    stress_obstacle = 'images whose values must stay in [0, 1]'  # for projects/paper/tools/compare_norms.py --stress

    def __init__(self, backbone: dict, data_preprocessor: dict | None = None, init_cfg: dict | None = None):
        super().__init__(data_preprocessor or dict(type='PairDataPreprocessor'), init_cfg)
        self.backbone = MODELS.build(backbone)

    @torch.no_grad()
    def draw(self, image: np.ndarray) -> np.ndarray:
        """An image, uint8 BGR `(h, w, 3)`, with the enhanced image on its right; for tools/infer.py."""
        data = dict(inputs=[torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))])
        enhanced, = self(**self.data_preprocessor(data))
        after = (enhanced.flip(0) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
        return np.hstack([image, after])

    def forward(self, inputs: Sequence[Tensor], data_samples: Sequence[BaseDataElement] | None = None,
                mode: str = 'tensor') -> list | dict:
        """Enhances images.

        Args:
            inputs: RGB `(3, h, w)` in [0, 1].
            data_samples: each with its `target` of the same shape, for 'loss'. Defaults to None.
            mode: 'tensor' returns the enhanced images; 'loss' the mean L1 distance to the targets, in a dict;
                'predict' the data samples with the image as `before` and the enhanced one as `pred`.

        Raises:
            ValueError: `mode` is unknown.
        """
        enhanced = enhance_each(self.backbone, inputs)
        if mode == 'tensor':
            return enhanced
        if mode == 'loss':
            return dict(loss=torch.stack([F.l1_loss(image, sample.target)
                                          for image, sample in zip(enhanced, data_samples, strict=True)]).mean())
        if mode != 'predict':
            raise ValueError(f"mode must be 'tensor', 'loss' or 'predict', got {mode!r}")
        samples = data_samples or [BaseDataElement() for _ in inputs]
        for sample, image, better in zip(samples, inputs, enhanced, strict=True):
            sample.before, sample.pred = image, better
        return samples
