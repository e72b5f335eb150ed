"""The fold rules of models of OpenMMLab and timm; a package is imported only with a model of it."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pkgutil import resolve_name

import torch
from torch import Tensor, nn

from ..rules import fold_rule
from .images import as_it_is, on_images

fold_rule('mmdet.models.backbones.swin.SwinTransformer', 'mmpretrain.models.backbones.base_backbone.BaseBackbone',
          methods=())(lambda model: [on_images(model, as_it_is)])
fold_rule('timm.models', methods=())(
    lambda model: [on_images(model, as_it_is)] if hasattr(model, 'pretrained_cfg') else [])


def _add_rule(kind: str, sample: str, compared: Callable) -> None:
    """Adds the rule for models of mmengine of the class `kind`, whose data samples are of the class `sample`.

    `compared(model, inputs, samples)` returns the outputs to compare.
    """
    def call(model: nn.Module, image: Tensor):
        size = tuple(image.shape[2:])
        data = dict(inputs=[channels.byte() for channels in image], data_samples=[resolve_name(sample)(metainfo=dict(
            img_shape=size, ori_shape=size, batch_input_shape=size, pad_shape=size, scale_factor=(1., 1.), img_id=0))])
        data = model.data_preprocessor(data, False)
        inputs = data['inputs']  # a list if the preprocessor is mmengine's own
        inputs = inputs if isinstance(inputs, Tensor) else torch.stack(list(inputs))
        return compared(model, inputs.to(image), data['data_samples'])

    fold_rule(kind, methods=())(lambda model: [on_images(model, call)])


def _predictions(model: nn.Module, inputs: Tensor, samples: list):
    return model(inputs, samples, mode='predict')


def _logits(model: nn.Module, inputs: Tensor, samples: list) -> list[Tensor]:
    return [sample.seg_logits.data for sample in _predictions(model, inputs, samples)]


def _features(model: nn.Module, inputs: Tensor, samples: list):
    """A detector's feature maps; what it finds in noise is a matter of rounding."""
    with suppress(Exception):  # a model without a `test_cfg` cannot predict
        _predictions(model, inputs, samples)
    return model.extract_feat(inputs)


# A model of the user's own, or of another package: an image is tried.
_add_rule('mmengine.model.base_model.base_model.BaseModel', 'mmengine.structures.BaseDataElement', _predictions)
_add_rule('mmpretrain.models.classifiers.base.BaseClassifier', 'mmpretrain.structures.DataSample', _predictions)
_add_rule('mmseg.models.segmentors.base.BaseSegmentor', 'mmseg.structures.SegDataSample', _logits)
_add_rule('mmdet.models.detectors.base.BaseDetector', 'mmdet.structures.DetDataSample', _features)
