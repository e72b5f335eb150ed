"""An enhancer before any detector or classifier, frozen or trained with the task's loss (arXiv 2205.14871)."""
from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
from mmengine.model import BaseDataPreprocessor
from mmengine.registry import MODELS
from torch import Tensor, nn

from .model import enhance_each


class EnhancingPreprocessor(BaseDataPreprocessor):
    """Enhances images, then passes them to the data preprocessor of a model, whose attributes it also has.

    Args:
        inner (nn.Module): the data preprocessor of a detector or a classifier.
        enhancer (nn.Module): takes RGB `(N, 3, H, W)` in [0, 1], and `sizes`, as :class:`IAT`.
        frozen (bool): whether the enhancer stays in eval mode and gets no gradient.
        takes_rgb (bool): whether images come in RGB. mmcv reads them in BGR.
    """

    def __init__(self, inner: nn.Module, enhancer: nn.Module, frozen: bool, takes_rgb: bool):
        super().__init__()
        self.inner = inner
        self.enhancer = enhancer.requires_grad_(False).eval() if frozen else enhancer
        self.frozen = frozen
        self.takes_rgb = takes_rgb

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__('inner'), name)

    def init_weights(self) -> None:
        """Initializes the enhancer, from its checkpoint if it has one."""
        self.enhancer.init_weights()

    def train(self, mode: bool = True) -> EnhancingPreprocessor:
        """Sets the mode of all parts, except that a frozen enhancer stays in eval mode."""
        super().train(mode)
        if self.frozen:
            self.enhancer.eval()
        return self

    def forward(self, data: dict, training: bool = False) -> dict:
        """Enhances the images `(3, h, w)`, 0 to 255, of a batch and returns the result of `inner`.

        Raises:
            TypeError: `inputs` are neither images of three channels nor a batch of them.
        """
        images = self.cast_data(data['inputs'])
        if not all(isinstance(image, Tensor) and image.dim() == 3 and len(image) == 3 for image in images):
            raise TypeError(f'{type(self).__name__}: inputs must be images (3, h, w), got '
                            f'{[tuple(getattr(image, "shape", ())) or type(image).__name__ for image in images]}')
        with torch.no_grad() if self.frozen else nullcontext():
            enhanced = enhance_each(self.enhance, images)
        enhanced = torch.stack(enhanced) if isinstance(images, Tensor) else enhanced
        return self.inner({**data, 'inputs': enhanced}, training)

    def enhance(self, images: Tensor, sizes: Tensor | None = None) -> Tensor:
        """Enhances images `(N, 3, H, W)` of 0 to 255 in the channel order of `takes_rgb`; `sizes` as for IAT."""
        rgb = self._flipped(images.float().clamp(0., 255.) / 255)  # training distortions may exceed 0 to 255
        rgb = self.enhancer(rgb) if sizes is None else self.enhancer(rgb, sizes)
        return self._flipped(rgb.float() * 255)

    def _flipped(self, images: Tensor) -> Tensor:
        """RGB from the order of the images, and back."""
        return images if self.takes_rgb else images.flip(-3)


@MODELS.register_module(name='EnhancedModel')
def enhanced_model(task_model: str, enhancer: dict, freeze_enhancer: bool = False, takes_rgb: bool = False,
                   **cfg) -> nn.Module:
    """Builds a detector of mmdet or a classifier of mmpretrain with an image enhancer before it.

    Two lines change any config: `model=dict(type='EnhancedModel', task_model='MaskRCNN', enhancer=dict(type='IAT',
    init_cfg=...))`. The model is of the class `task_model` and keeps the names of its parameters. The enhancer is
    `data_preprocessor.enhancer`.

    Args:
        task_model (str): the model's own type, such as 'MaskRCNN'.
        enhancer (dict): config of the enhancer.
        freeze_enhancer (bool): whether the enhancer is frozen. Otherwise it is trained by the task's loss. Defaults to
            False.
        takes_rgb (bool): whether the images of the data set are RGB, as in CIFAR. mmcv reads BGR. Defaults to False.
        **cfg: the model's other settings, unchanged.
    """
    model = MODELS.build(dict(type=task_model, **copy.deepcopy(cfg)))
    model.data_preprocessor = EnhancingPreprocessor(model.data_preprocessor, MODELS.build(enhancer), freeze_enhancer,
                                                    takes_rgb)
    return model


enhanced_model.norm_parts = ('enhancer', )  # for `--norm`
