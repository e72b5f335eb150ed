"""The fold rules of mmpretrain's models."""
from mmpretrain.models.backbones.base_backbone import BaseBackbone
from mmpretrain.models.classifiers import BaseClassifier
from mmpretrain.structures import DataSample

from ..rules import Example, fold_rule
from .images import as_it_is, on_images, preprocessed

fold_rule(BaseBackbone, methods=())(lambda model: [on_images(model, as_it_is)])


@fold_rule(BaseClassifier, methods=())
def classifier(model) -> list[Example]:
    return [on_images(model, lambda model, image: model(*preprocessed(model, image, DataSample()), mode='predict'))]
