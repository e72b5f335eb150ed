"""The fold rules of mmdet's models, and of its window attention; mmdet is imported only with a model of it."""
from __future__ import annotations

from contextlib import suppress

from ..fusion.padding import become
from ..fusion.rules import Example, Fills, fold_rule
from .images import as_it_is, on_images, preprocessed

SWIN = 'mmdet.models.backbones.swin'


def _pad(attn, fill):
    from .mmdet_windows import FilledShiftWindowMSA
    become(attn, FilledShiftWindowMSA, fill)


fold_rule(f'{SWIN}.SwinTransformer', methods=())(lambda model: [on_images(model, as_it_is)])
fold_rule(f'{SWIN}.ShiftWindowMSA', methods=('forward', 'window_partition', 'window_reverse'))(
    lambda module: [Fills(_pad)])


@fold_rule('mmdet.models.detectors.base.BaseDetector', methods=())
def detector(model) -> list[Example]:
    """Its feature maps are compared; what it finds in noise is a matter of rounding."""
    from mmdet.structures import DetDataSample

    def call(model, image):
        size = tuple(image.shape[2:])
        sample = DetDataSample(metainfo=dict(img_shape=size, ori_shape=size, batch_input_shape=size, pad_shape=size,
                                             scale_factor=(1., 1.), img_id=0))
        inputs, samples = preprocessed(model, image, sample)
        with suppress(Exception):  # a model without a `test_cfg` cannot predict
            model(inputs, samples, mode='predict')
        return model.extract_feat(inputs)

    return [on_images(model, call)]
