"""The fold rules of mmpretrain's models, and of its window attention."""
from __future__ import annotations

from mmpretrain.models.backbones.base_backbone import BaseBackbone
from mmpretrain.models.classifiers import BaseClassifier
from mmpretrain.models.utils import ShiftWindowMSA
from mmpretrain.structures import DataSample

from ..fusion.padding import become
from ..fusion.rules import Example, Fills, fold_rule
from .images import as_it_is, on_images, preprocessed
from .windows import FilledShiftWindowMSA

fold_rule(BaseBackbone, methods=())(lambda model: [on_images(model, as_it_is)])
fold_rule(ShiftWindowMSA, methods=('forward', 'get_attn_mask', 'window_partition', 'window_reverse'))(
    lambda module: [Fills(lambda attn, fill: become(attn, FilledShiftWindowMSA, fill))])


@fold_rule(BaseClassifier, methods=())
def classifier(model) -> list[Example]:
    def call(model, image):
        return model(*preprocessed(model, image, DataSample()), mode='predict')

    return [on_images(model, call)]
