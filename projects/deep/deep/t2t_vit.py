"""mmunorm's T2T-ViT with every residual of its encoder replaceable."""
from __future__ import annotations

from mmengine.registry import MODELS
from mmpretrain.models.backbones.t2t_vit import T2TTransformerLayer

from mmunorm.backbones import UNT2TViT

from .residuals import DEFAULT_NORM_CFG, DEFAULT_RESIDUAL_CFG, connect, initialize, norm_of, scheme_of
from .vit import ResidualPreLayer


class ResidualT2TLayer(ResidualPreLayer, T2TTransformerLayer):
    """The encoder layer of T2T-ViT."""


@MODELS.register_module()
class ResidualT2TViT(UNT2TViT):
    """:class:`mmunorm.backbones.UNT2TViT` with `residual_cfg` in every layer of the encoder.

    Args:
        norm_cfg, residual_cfg, final_norm: as of :class:`.UNVisionTransformer`. The tokens-to-token module changes the
            width of its tokens and keeps its own residuals.
        *args, **kwargs: the other arguments of :class:`mmunorm.backbones.UNT2TViT`.

    Raises:
        ResidualError: `residual_cfg` names no scheme or a wrong argument, or does not go with the model or its norms.
    """

    def __init__(self, *args, norm_cfg: dict = DEFAULT_NORM_CFG, residual_cfg: dict = DEFAULT_RESIDUAL_CFG,
                 final_norm: bool | None = None, **kwargs):
        norm_cfg = norm_of(residual_cfg, norm_cfg)
        super().__init__(*args, norm_cfg=norm_cfg, final_norm=scheme_of(residual_cfg).final_norm
                         if final_norm is None else final_norm, **kwargs)
        connect(self, self.encoder, ResidualT2TLayer, residual_cfg, norm_cfg)
        initialize(self, self.encoder, self.tokens_to_token.project)

    def init_weights(self) -> None:
        """As the base class, then the initial weights of the residual scheme, unless a checkpoint is loaded."""
        super().init_weights()
        initialize(self, self.encoder, self.tokens_to_token.project)
