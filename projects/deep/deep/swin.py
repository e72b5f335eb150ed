"""mmunorm's Swin Transformer with every residual replaceable."""
from __future__ import annotations

import torch.utils.checkpoint as cp
from mmengine.registry import MODELS
from mmpretrain.models.backbones.swin_transformer import SwinBlock
from torch import Tensor

from mmunorm.backbones import UNSwinTransformer

from .residuals import DEFAULT_NORM_CFG, DEFAULT_RESIDUAL_CFG, ResidualLayer, connect, initialize, norm_of


class ResidualSwinBlock(ResidualLayer, SwinBlock):
    """mmpretrain's Swin block with the connections of a residual scheme."""
    norm_names = ('norm1', 'norm2')

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """`(B, H * W, C)` to the same shape; `hw_shape` is `(H, W)`."""

        def run(x: Tensor) -> Tensor:
            x = self.residual1(x, lambda y: self.attn(y, hw_shape), self.norm1)
            return self.residual2(x, self.ffn, self.norm2)

        return cp.checkpoint(run, x) if self.with_cp and x.requires_grad else run(x)


@MODELS.register_module()
class ResidualSwinTransformer(UNSwinTransformer):
    """:class:`mmunorm.backbones.UNSwinTransformer` with `residual_cfg` in every block.

    Args:
        norm_cfg, residual_cfg (dict): as of :class:`.UNVisionTransformer`; not DLCL. The depth that a scheme goes by is
            the number of all blocks. The output norms stay with every scheme.
        *args, **kwargs: the other arguments of :class:`mmunorm.backbones.UNSwinTransformer`.

    Raises:
        ResidualError: `residual_cfg` names no scheme or a wrong argument, or does not go with the model or its norms.
    """

    def __init__(self, *args, norm_cfg: dict = DEFAULT_NORM_CFG, residual_cfg: dict = DEFAULT_RESIDUAL_CFG, **kwargs):
        norm_cfg = norm_of(residual_cfg, norm_cfg)
        super().__init__(*args, norm_cfg=norm_cfg, **kwargs)
        connect(self, self.blocks(), ResidualSwinBlock, residual_cfg, norm_cfg)
        initialize(self, self.blocks(), self.patch_embed.projection)
        self._freeze_stages()  # the connections of frozen stages, too

    def blocks(self) -> list[SwinBlock]:
        """The blocks of all stages."""
        return [block for stage in self.stages for block in stage.blocks]

    def init_weights(self) -> None:
        """As the base class, then the initial weights of the residual scheme, unless a checkpoint is loaded."""
        super().init_weights()
        initialize(self, self.blocks(), self.patch_embed.projection)
