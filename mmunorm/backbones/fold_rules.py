"""Fold rules of these backbones: how to run them, and the padding of patch merging."""
from __future__ import annotations

from mmcv.cnn.bricks.transformer import AdaptivePadding
from torch import Tensor

from ..fusion.padding import fill_up, filled
from ..fusion.rules import Fills, fold_rule
from ..fusion.stock_rules.images import as_it_is, on_images
from .swin import UNSwinTransformer
from .t2t_vit import UNT2TViT


class FilledPadding(AdaptivePadding):
    """mmcv's padding before patch merging, with the token `pad_value` instead of zeros."""

    def forward(self, x: Tensor) -> Tensor:
        """Pads `(B, C, H, W)` at the bottom and on the right."""
        below, right = self.get_pad_shape(x.shape[2:])
        if below == 0 and right == 0:
            return x
        return fill_up(x.movedim(1, -1), below, right, self.pad_value).movedim(-1, 1)


@fold_rule(AdaptivePadding, methods=('forward', 'get_pad_shape'))
def adaptive_padding(padding):
    if padding.padding == 'corner':
        yield Fills(lambda padding, fill: filled(padding, FilledPadding, fill))


fold_rule(UNSwinTransformer, UNT2TViT)(lambda backbone: [on_images(backbone, as_it_is)])
