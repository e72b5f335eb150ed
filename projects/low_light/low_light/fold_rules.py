"""Fold rules of the enhancers: how to run them on an example."""
import torch

from mmunorm.fusion.rules import Example, fold_rule

from .iat import IAT
from .model import ImageEnhancer


def _image(model):
    return torch.rand(3, 37, 51, generator=torch.Generator().manual_seed(0)).to(next(model.parameters()))


fold_rule(IAT, methods=())(lambda model: [Example(lambda model: model(_image(model)[None]))])
fold_rule(ImageEnhancer, methods=())(lambda model: [Example(lambda model: model([_image(model)]))])
