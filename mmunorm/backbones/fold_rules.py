"""Fold rules of these backbones: their residual streams, and the padding of patch merging."""
from __future__ import annotations

from mmcv.cnn.bricks.transformer import AdaptivePadding
from torch import Tensor, nn

from ..fusion.padding import Fill, fill_up
from ..fusion.rules import Fills, Stream, fold_rule
from ..fusion.stock_rules.images import as_it_is, on_images
from ..residuals.fold_rules import residual_layer, stations_of
from .swin import ResidualSwinBlock, UNSwinTransformer
from .t2t_vit import ResidualT2TLayer, UNT2TViT
from .vit import ResidualEncoderLayer, UNVisionTransformer

fold_rule(ResidualSwinBlock, ResidualT2TLayer, ResidualEncoderLayer)(residual_layer)


class FilledPadding(AdaptivePadding):
    """mmcv's padding before patch merging, with the token `pad_value` instead of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        """Pads `(B, C, H, W)` at the bottom and on the right."""
        below, right = self.get_pad_shape(x.shape[2:])
        if below == 0 and right == 0:
            return x
        return fill_up(x.movedim(1, -1), below, right, self.pad_value).movedim(-1, 1)


def _fill(padding: nn.Module, fill: Fill) -> None:
    padding.__class__ = FilledPadding
    padding.register_buffer('pad_value', fill.value)


@fold_rule(AdaptivePadding, methods=('forward', 'get_pad_shape'))
def adaptive_padding(padding):
    if padding.padding == 'corner':
        yield Fills(_fill)


@fold_rule(UNSwinTransformer)
def un_swin(backbone):
    yield on_images(backbone, as_it_is)
    for i, stage in enumerate(backbone.stages):
        if stations := stations_of(stage.blocks, f'stages.{i}.blocks'):
            ends = [f'stages.{i}.downsample.norm'] if stage.downsample is not None else []
            if i in backbone.out_indices and not (backbone.out_after_downsample and stage.downsample is not None):
                ends.append(f'norm{i}')
            yield Stream(stations, tuple(ends))


def encoder(backbone, name, final):
    """Facts about an encoder whose final norm, if it has one, is `final`."""
    yield on_images(backbone, as_it_is)
    layers = getattr(backbone, name)
    if list(backbone.out_indices) == [len(layers) - 1] and (stations := stations_of(layers, name)):
        yield Stream(stations, (final, ) if final else ())


@fold_rule(UNT2TViT)
def un_t2t_vit(backbone):
    yield from encoder(backbone, 'encoder', 'norm' if backbone.final_norm else '')


@fold_rule(UNVisionTransformer)
def un_vision_transformer(backbone):
    is_averaged = backbone.out_type == 'avg_featmap'
    # A final norm before the average pooling is part of the stream; one after it is an ordinary norm.
    final = 'ln1' if backbone.final_norm else 'ln2' if is_averaged else ''
    yield from encoder(backbone, 'layers', final)
