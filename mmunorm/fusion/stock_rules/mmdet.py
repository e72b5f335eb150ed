"""The fold rules of mmdet's models, mmseg's and others of mmengine; a package is imported only with a model of it."""
from __future__ import annotations

from contextlib import suppress

from ..rules import Example, fold_rule
from .images import as_it_is, on_images, preprocessed

fold_rule('mmdet.models.backbones.swin.SwinTransformer', methods=())(lambda model: [on_images(model, as_it_is)])


@fold_rule('mmdet.models.detectors.base.BaseDetector', methods=())
def detector(model) -> list[Example]:
    """Its feature maps are compared; what it finds in noise is a matter of rounding."""
    from mmdet.structures import DetDataSample

    def call(model, image):
        inputs, samples = preprocessed(model, image, DetDataSample(metainfo=_metainfo(image)))
        with suppress(Exception):  # a model without a `test_cfg` cannot predict
            model(inputs, samples, mode='predict')
        return model.extract_feat(inputs)

    return [on_images(model, call)]


@fold_rule('mmseg.models.segmentors.base.BaseSegmentor', methods=())
def segmentor(model) -> list[Example]:
    """The logits of its pixels are compared."""
    from mmseg.structures import SegDataSample

    def call(model, image):
        inputs, samples = preprocessed(model, image, SegDataSample(metainfo=_metainfo(image)))
        return [sample.seg_logits.data for sample in model(inputs, samples, mode='predict')]

    return [on_images(model, call)]


@fold_rule('mmengine.model.base_model.base_model.BaseModel', methods=())
def base_model(model) -> list[Example]:
    """A model of the user's own, or of another package: an image is tried."""
    from mmengine.structures import BaseDataElement

    def call(model, image):
        return model(*preprocessed(model, image, BaseDataElement(metainfo=_metainfo(image))), mode='predict')

    return [on_images(model, call)]


def _metainfo(image) -> dict:
    size = tuple(image.shape[2:])
    return dict(img_shape=size, ori_shape=size, batch_input_shape=size, pad_shape=size, scale_factor=(1., 1.), img_id=0)
