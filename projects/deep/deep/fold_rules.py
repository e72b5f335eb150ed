"""Fold rules of the backbones of this project: how to run them, their residual streams and factors."""
from __future__ import annotations

from mmunorm.fusion import fold_rule
from mmunorm.fusion.stock_rules.images import as_it_is, on_images

from .residuals.folding import branch_factors, post_norm_streams
from .swin import ResidualSwinBlock, ResidualSwinTransformer
from .t2t_vit import ResidualT2TLayer, ResidualT2TViT
from .vit import ResidualEncoderLayer, UNVisionTransformer

fold_rule(ResidualSwinBlock, ResidualT2TLayer, ResidualEncoderLayer)(branch_factors)


@fold_rule(ResidualSwinTransformer)
def swin(backbone):
    yield on_images(backbone, as_it_is)
    for i, stage in enumerate(backbone.stages):
        ends = [f'stages.{i}.downsample.norm'] if stage.downsample is not None else []
        if i in backbone.out_indices and not (backbone.out_after_downsample and stage.downsample is not None):
            ends.append(f'norm{i}')
        yield from post_norm_streams(stage.blocks, f'stages.{i}.blocks', ends)


def encoder(backbone, name, final):
    """Facts about an encoder whose final norm, if it has one, is `final`."""
    yield on_images(backbone, as_it_is)
    layers = getattr(backbone, name)
    if list(backbone.out_indices) == [len(layers) - 1]:
        yield from post_norm_streams(layers, name, [final] if final else [])


@fold_rule(ResidualT2TViT)
def t2t_vit(backbone):
    yield from encoder(backbone, 'encoder', 'norm' if backbone.final_norm else '')


@fold_rule(UNVisionTransformer)
def un_vision_transformer(backbone):
    is_averaged = backbone.out_type == 'avg_featmap'
    # A final norm before the average pooling is part of the stream; one after it is an ordinary norm.
    final = 'ln1' if backbone.final_norm else 'ln2' if is_averaged else ''
    yield from encoder(backbone, 'layers', final)
