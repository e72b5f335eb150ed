"""Vision Transformer (arXiv 2010.11929) and DeiT (arXiv 2012.12877) with every norm and every residual replaceable."""
from __future__ import annotations

from collections.abc import Sequence

from mmengine.model import BaseModule
from mmengine.registry import MODELS
from mmpretrain.models import VisionTransformer
from mmpretrain.models.backbones.vision_transformer import TransformerEncoderLayer
from torch import Tensor, nn

from .init import remove_biases
from .residuals import (
    DEFAULT_NORM_CFG,
    DEFAULT_RESIDUAL_CFG,
    ResidualLayer,
    connect,
    initialize,
    norm_of,
    scheme_of,
)


class ResidualPreLayer(ResidualLayer):
    """A layer of mmpretrain with `ln1`, `attn`, `ln2` and `ffn`, and the connections of a residual scheme."""
    norm_names = ('ln1', 'ln2')

    def forward(self, x: Tensor) -> Tensor:
        """`(B, L, C)` to the same shape."""
        x = self.residual1(x, self.attn, self.ln1)
        return self.residual2(x, self.ffn, self.ln2)


class ResidualEncoderLayer(ResidualPreLayer, TransformerEncoderLayer):
    """The encoder layer of the Vision Transformer."""

    def init_weights(self) -> None:
        """The stock initialization; the stock method requires a bias in every linear layer of the FFN."""
        BaseModule.init_weights(self)
        for module in self.ffn.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.normal_(module.bias, std=1e-6)


@MODELS.register_module()
class UNVisionTransformer(VisionTransformer):
    """mmpretrain's Vision Transformer with `norm_cfg` in every norm, and `residual_cfg` in every residual.

    With `norm_cfg=dict(type='LN', eps=1e-6)` and the default `residual_cfg`, the outputs and the names in
    `state_dict` are the stock ones. DeiT is `arch='deit-small'` and the like.

    Takes `(N, in_channels, H, W)` and returns a tuple with one output for each of `out_indices`.

    Args:
        arch (str | dict): an architecture of mmpretrain's, or a dict of `embed_dims`, `num_layers`, `num_heads` and
            `feedforward_channels`. Defaults to 'base'.
        norm_cfg (dict): config of every norm; one in `layer_cfgs` wins. Defaults to `dict(type='UN')`, and to
            `dict(type='NoNorm')` for the schemes without norms, ReZero, TFixup, RFixup and ScaledResidual.
        residual_cfg (dict): config of every residual, such as `dict(type='BranchNorm', warmup_iters=4000)`. The
            types are PostNorm, PreNorm, DeepNorm, BranchNorm, SubLN, NormFormer, Admin, DSInit, TFixup, RFixup,
            ReZero, SkipInit, LayerScale, ResPostNorm, PeriNorm, ScaledResidual and DLCL. Where a scheme has
            initial weights, they win over `init_cfg` in the layers. Defaults to `dict(type='PreNorm')`.
        out_indices (int | Sequence[int]): layers whose output is returned. Defaults to -1, the last.
        final_norm (bool, optional): whether there is a norm after the last layer. Defaults to None: False for
            PostNorm, DeepNorm, BranchNorm, Admin and DSInit, else True.
        frozen_stages (int): freezes the embedding and this number of layers. They get no gradient and stay in eval
            mode, so their statistics do not change. -1 freezes nothing. Defaults to -1.
        bias (bool): whether linear layers and convolutions have a bias; T5 (arXiv 1910.10683) has none. Norms keep
            their shift: `dict(type='RMSN')` has none. Defaults to True.
        **kwargs: the other arguments of :class:`mmpretrain.models.VisionTransformer`, with its defaults.

    Raises:
        TypeError: `norm_cfg` is not a dict with a `type`.
        ResidualError: `residual_cfg` names no scheme or a wrong argument, or does not go with the model or its norms.
    """

    def __init__(self, arch: str | dict = 'base', *, norm_cfg: dict = DEFAULT_NORM_CFG,
                 residual_cfg: dict = DEFAULT_RESIDUAL_CFG, out_indices: int | Sequence[int] = -1,
                 final_norm: bool | None = None, frozen_stages: int = -1, bias: bool = True, **kwargs):
        norm_cfg = norm_of(residual_cfg, norm_cfg)
        super().__init__(
            arch,
            norm_cfg=norm_cfg,
            # The stock class writes into this list.
            out_indices=[out_indices] if isinstance(out_indices, int) else list(out_indices),
            final_norm=scheme_of(residual_cfg).final_norm if final_norm is None else final_norm,
            **kwargs)
        if not bias:
            remove_biases(self)
        connect(self, self.layers, ResidualEncoderLayer, residual_cfg, norm_cfg)
        initialize(self, self.layers, self.patch_embed.projection)
        # After `connect`, so that the connections of frozen layers are frozen too.
        self.frozen_stages = frozen_stages
        if frozen_stages > 0:
            self._freeze_stages()

    def init_weights(self) -> None:
        """Like the stock method, then the initial weights of the residual scheme, unless a checkpoint is loaded."""
        super().init_weights()
        initialize(self, self.layers, self.patch_embed.projection)

    def train(self, mode: bool = True) -> UNVisionTransformer:
        """Like the stock method, but frozen layers stay in eval mode, and the module is returned."""
        super().train(mode)
        if mode and self.frozen_stages > 0:
            self._freeze_stages()
            self.pre_norm.eval()
        return self
