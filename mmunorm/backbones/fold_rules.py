"""Where the norms of these backbones go when a model is folded."""
from __future__ import annotations

from mmcv.cnn.bricks.transformer import AdaptivePadding
from torch import Tensor, nn

from ..fusion.padding import Fill, fill_up
from ..fusion.rules import Emits, Reads, Stays, Stream, fold_rule
from ..residuals.fold_rules import residual_layer, stations_of
from ..stock_rules.mmpretrain import ENCODER, emits_norms, transformer_layer, vision_transformer
from .performer import PerformerAttention, PerformerLayer
from .swin import ResidualSwinBlock, UNSwinTransformer
from .t2t_vit import ResidualT2TLayer, UNT2TViT
from .vit import ResidualEncoderLayer, UNVisionTransformer

fold_rule(PerformerAttention)(lambda module: [Reads('kqv')])
fold_rule(PerformerLayer)(transformer_layer)
fold_rule(ResidualSwinBlock, ResidualT2TLayer, ResidualEncoderLayer)(residual_layer)


class FilledPadding(AdaptivePadding):
    """mmcv's padding of a map before patch merging, with the token `pad_value` instead of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        """`(B, C, H, W)`, filled up at the bottom and to the right."""
        below, right = self.get_pad_shape(x.shape[2:])
        if below == 0 and right == 0:
            return x
        return fill_up(x.movedim(1, -1), below, right, self.pad_value).movedim(-1, 1)


def _pad_merging(module: nn.Module, fill: Fill) -> None:
    if module.adaptive_padding is not None:
        module.adaptive_padding.__class__ = FilledPadding
        module.adaptive_padding.register_buffer('pad_value', fill.value.to(module.reduction.weight))


@fold_rule(UNSwinTransformer)
def un_swin(backbone):
    yield from emits_norms(backbone)
    for i, stage in enumerate(backbone.stages):
        padding = getattr(stage.downsample, 'adaptive_padding', None)
        stations = stations_of(stage.blocks, f'stages.{i}.blocks')
        if not stations or padding is not None and padding.padding != 'corner':
            continue
        ends, pads = [], []
        if stage.downsample is not None:
            ends.append(f'stages.{i}.downsample.norm')
            pads.append((f'stages.{i}.downsample', _pad_merging))
        if i in backbone.out_indices and not (backbone.out_after_downsample and stage.downsample is not None):
            ends.append(f'norm{i}')
        yield Stream(stations, tuple(ends), tuple(pads))


def encoder(backbone, name, final):
    """Facts about an encoder whose final norm, if it has one, is `final`."""
    layers = getattr(backbone, name)
    last = len(layers) - 1
    if last not in backbone.out_indices:
        return
    stations = stations_of(layers, name)
    is_only_output = list(backbone.out_indices) == [last]
    if stations and is_only_output:
        yield Stream(stations, (final, ) if final else ())
    for station in stations if not is_only_output else ():
        yield Stays(station.norm, 'the stream it stands in is an output in its middle, too')
    if final:
        yield Emits(final)
    elif stations and is_only_output:
        yield Emits(stations[-1].norm)


@fold_rule(UNT2TViT, methods=ENCODER)
def un_t2t_vit(backbone):
    yield from encoder(backbone, 'encoder', 'norm' if backbone.final_norm else '')


@fold_rule(UNVisionTransformer, methods=ENCODER)
def un_vision_transformer(backbone):
    if backbone.out_type == 'avg_featmap' and backbone.final_norm:
        yield from vision_transformer(backbone)
    else:
        is_averaged = backbone.out_type == 'avg_featmap'
        yield from encoder(backbone, 'layers', 'ln2' if is_averaged else 'ln1' if backbone.final_norm else '')
