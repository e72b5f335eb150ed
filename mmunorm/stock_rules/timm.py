"""The fold rules of timm's models, whose norms `mmunorm.replace_norms` replaced, and of its Swin blocks.

timm itself is imported only with a model of it.
"""
from __future__ import annotations

from ..fusion.padding import become
from ..fusion.rules import Fills, fold_rule
from .images import as_it_is, on_images


def _pad(block, fill):
    from .timm_block import FilledSwinTransformerBlock
    become(block, FilledSwinTransformerBlock, fill)


fold_rule('timm.models', methods=())(
    lambda model: [on_images(model, as_it_is)] if hasattr(model, 'pretrained_cfg') else [])
fold_rule('timm.models.swin_transformer.SwinTransformerBlock', methods=('forward', '_attn', 'get_attn_mask'))(
    lambda block: [Fills(_pad)])
