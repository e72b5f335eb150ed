"""T2T-ViT (Yuan et al., arXiv 2101.11986) with one `norm_cfg` for all norms, and Performer or softmax tokens."""
from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mmengine.model import BaseModule
from mmengine.registry import MODELS
from mmpretrain.models import T2T_ViT
from mmpretrain.models.backbones.t2t_vit import T2TModule as StockT2TModule
from mmpretrain.models.backbones.t2t_vit import T2TTransformerLayer, get_sinusoid_encoding
from mmpretrain.models.utils import to_2tuple
from torch.nn import functional as F

from ..norms.base import DEFAULT_NORM_CFG, check_norm_cfg
from .performer import PerformerLayer

# As in mmpretrain's T2T-ViT configs.
DEFAULT_INIT_CFG = dict(type='TruncNormal', layer='Linear', std=0.02)


def _scale_attention(layer: T2TTransformerLayer, qk_scale: float | None) -> None:
    """Scales the logits by `qk_scale`, None for `1 / sqrt(head_dims)`.

    mmpretrain's layer ignores its `qk_scale` and divides by `1 / sqrt(head_dims)`: its logits in the encoder are
    `head_dims` times too large.
    """
    layer.attn.scaled_dot_product_attention = partial(F.scaled_dot_product_attention, scale=qk_scale)


class T2TModule(StockT2TModule):
    """mmpretrain's tokens-to-token module with `norm_cfg` in its four norms, and with the Performer.

    Takes `(N, in_channels, H, W)` and returns tokens `(N, L, embed_dims)` and their map size `(h, w)`. Arguments are
    those of :class:`UNT2TViT`, and `token_dims`, the channels inside; `use_performer`, False for softmax attention; and
    `performer_drop_rate`, by default the authors' 0.1.

    Raises:
        ValueError: `img_size` is smaller than the stride of 16.
    """

    def __init__(self, img_size: int | tuple[int, int] = 224, in_channels: int = 3, embed_dims: int = 384,
                 token_dims: int = 64, use_performer: bool = True, performer_drop_rate: float = 0.1,
                 norm_cfg: dict = DEFAULT_NORM_CFG, init_cfg: dict | None = None):
        super().__init__(in_channels=in_channels, embed_dims=embed_dims, token_dims=token_dims, init_cfg=init_cfg)
        check_norm_cfg(norm_cfg)
        # The soft splits have 7 x 7, then 3 x 3 positions. These blocks replace the stock ones.
        for step, input_dims in ((1, in_channels * 7 * 7), (2, token_dims * 3 * 3)):
            if use_performer:
                layer = PerformerLayer(input_dims, token_dims, performer_drop_rate, norm_cfg)
            else:
                layer = T2TTransformerLayer(token_dims, 1, token_dims, input_dims=input_dims, norm_cfg=norm_cfg)
                _scale_attention(layer, input_dims**-0.5)  # as the authors' code
            setattr(self, f'attention{step}', layer)

        self.init_out_size = [side // 16 for side in to_2tuple(img_size)]
        self.num_patches = self.init_out_size[0] * self.init_out_size[1]
        if self.num_patches == 0:
            raise ValueError(f'img_size={img_size!r}: each side must be at least 16, the stride of the tokens')


@MODELS.register_module()
class UNT2TViT(T2T_ViT):
    """T2T-ViT, based on mmpretrain's class, with `norm_cfg` used in EVERY norm, and with Performer tokens.

    T2T-ViT-14, the default, has 33 norms. With a linear head for 1000 classes it has 21,465,806 trainable
    parameters; the paper gives 21.5 M. The sin-cos position table (75,648 numbers) and the Performers' random
    features (4,096) are not trained. That makes 21,545,550 numbers in all.

    With softmax tokens (`t2t_cfg=dict(use_performer=False)`), the names in `state_dict` are those of the stock
    class. The outputs are not: the stock class of mmpretrain 1.x multiplies its attention's logits by
    `sqrt(head_dims)`, where the paper and mmpretrain's published weights divide by it, as this class does.
    Use `layer_cfgs=dict(qk_scale=head_dims**0.5)` for the weights of a model that was trained with the stock class.

    Takes `(N, in_channels, H, W)`. If the size is not `img_size`, the position table is resized.

    Args:
        img_size (int | tuple[int, int]): expected image size. Defaults to 224.
        in_channels (int): image channels. Defaults to 3.
        embed_dims (int): channels of the encoder. Defaults to 384.
        out_indices (int | Sequence[int]): layers whose output is returned. Defaults to -1, the last.
        norm_cfg (dict): config of every norm; one in `layer_cfgs` wins. Defaults to `dict(type='UN')`.
        t2t_cfg (dict, optional): extra arguments of :class:`T2TModule`, such as
            `dict(token_dims=64, use_performer=True)`; its `norm_cfg` wins over the argument above.
        init_cfg (dict | list[dict], optional): initialization config. Defaults to a truncated normal with
            a deviation of 0.02 for every linear layer.
        **kwargs: the other arguments of :class:`mmpretrain.models.T2T_ViT`, with its defaults.

    Raises:
        TypeError: `norm_cfg` is not a dict with a `type`.
        ValueError: `img_size` is smaller than 16, or `out_type` is unknown or needs a class token.
    """

    def __init__(self, img_size: int | tuple[int, int] = 224, in_channels: int = 3, embed_dims: int = 384, *,
                 out_indices: int | Sequence[int] = -1, norm_cfg: dict = DEFAULT_NORM_CFG,
                 t2t_cfg: dict | None = None, init_cfg: dict | list[dict] | None = DEFAULT_INIT_CFG, **kwargs):
        check_norm_cfg(norm_cfg)
        super().__init__(
            # The stock tokens-to-token module takes no tuple, no norm and no Performer. So the stock class builds
            # a tiny one with a tiny position table, and ours replace them below.
            img_size=16,
            embed_dims=embed_dims,
            # The stock class writes into this list.
            out_indices=[out_indices] if isinstance(out_indices, int) else list(out_indices),
            norm_cfg=norm_cfg, init_cfg=init_cfg, **kwargs)
        defaults = dict(img_size=img_size, in_channels=in_channels, embed_dims=embed_dims, norm_cfg=norm_cfg)
        self.tokens_to_token = T2TModule(**{**defaults, **(t2t_cfg or {})})
        self.patch_resolution = self.tokens_to_token.init_out_size
        cfgs = kwargs.get('layer_cfgs', {})
        for i, layer in enumerate(self.encoder):
            _scale_attention(layer, (cfgs if isinstance(cfgs, dict) else cfgs[i]).get('qk_scale'))
        num_positions = self.tokens_to_token.num_patches + self.num_extra_tokens
        self.pos_embed = get_sinusoid_encoding(num_positions, embed_dims)

    def init_weights(self) -> None:
        """Like the stock method, which needs a class token."""
        if self.cls_token is None:
            BaseModule.init_weights(self)
        else:
            super().init_weights()

    def train(self, mode: bool = True) -> UNT2TViT:
        """Like the stock method, but returns the module."""
        super().train(mode)
        return self
