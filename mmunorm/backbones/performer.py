"""The Performer block of T2T-ViT (arXiv 2101.11986): attention at linear cost with positive random features.

FAVOR+ of Choromanski et al. (arXiv 2009.14794) as T2T-ViT uses it: one head, no scaling of queries and
keys, and a skip connection from the values, because the block changes the width of its tokens.
"""
from __future__ import annotations

import torch
from mmcv.cnn.bricks.transformer import FFN
from mmengine.model import BaseModule
from mmpretrain.models.utils import build_norm_layer
from torch import Tensor, nn

from ..norms.base import DEFAULT_NORM_CFG


def performer_attention(q: Tensor, k: Tensor, v: Tensor, w: Tensor, eps: float = 1e-8) -> Tensor:
    """Computes `phi(q) (phi(k)^T v) / (phi(q) . sum phi(k) + eps)`, which approximates `softmax(q k^T) v`.

    The features are `phi(x) = exp(w x - |x|^2 / 2) / sqrt(m)`; `phi(q) . phi(k)` estimates `exp(q . k)`. The exponent
    never exceeds `|w_i|^2 / 2`, so large inputs vanish and cannot overflow in float32.

    Args:
        q, k, v: `(B, N, d)`, any floating dtype. Computed in float32 (float64 for float64) under any autocast.
        w: random directions `(m, d)`.
        eps: keeps the quotient finite where all features vanish.

    Returns:
        `(B, N, d)` in the dtype of `v`.
    """
    dtype = torch.promote_types(v.dtype, torch.float32)
    w = w.to(dtype)

    def phi(x: Tensor) -> Tensor:  # times sqrt(m)
        x = x.to(dtype)
        return torch.exp(x @ w.t() - x.square().sum(-1, keepdim=True) / 2)

    with torch.autocast(v.device.type, enabled=False):
        q_features, k_features = phi(q), phi(k)
        weighted = q_features @ (k_features.transpose(1, 2) @ v.to(dtype))
        total = q_features @ k_features.sum(dim=1).unsqueeze(-1)
        # torch.onnx.export folds `+ 1e-8` to a no-op; where features vanish, the quotient would then be NaN.
        return (weighted / (total + eps * len(w))).to(v.dtype)


class PerformerAttention(BaseModule):
    """Single-head attention of T2T-ViT's Performer block: `v + dropout(proj(attention(q, k, v)))`.

    The random directions are the buffer `w`. It is drawn from torch's global generator, saved in checkpoints, and
    never trained. In distributed training, every rank must draw the same directions. With mmengine's default
    seeding (`diff_rank_seed=False`) it does.

    There are `m = int(embed_dims * kernel_ratio)` of them, orthogonal and of length `sqrt(m)`, as in the authors'
    release. `input_dims` are the input channels, `embed_dims` is the width of the block, and `drop_rate` is that of the
    dropout before the skip connection.
    """

    def __init__(self, input_dims: int, embed_dims: int, kernel_ratio: float = 0.5, drop_rate: float = 0.1):
        super().__init__()
        self.kqv = nn.Linear(input_dims, 3 * embed_dims)
        self.proj = nn.Linear(embed_dims, embed_dims)
        self.drop = nn.Dropout(drop_rate)
        num_features = int(embed_dims * kernel_ratio)
        w = nn.init.orthogonal_(torch.empty(num_features, embed_dims)) * num_features**0.5
        self.register_buffer('w', w)

    def forward(self, x: Tensor) -> Tensor:
        """`(B, N, input_dims)` to `(B, N, embed_dims)`."""
        k, q, v = self.kqv(x).chunk(3, dim=-1)
        return v + self.drop(self.proj(performer_attention(q, k, v, self.w)))


class PerformerLayer(BaseModule):
    """Pre-norm Performer block of T2T-ViT's tokens-to-token module.

    Parts are named as in mmpretrain's `T2TTransformerLayer`: `ln1`, `attn`, `ln2`, `ffn`. Arguments are those of
    :class:`PerformerAttention`; `drop_rate` is that of the dropout at the end of both branches.
    """

    def __init__(self, input_dims: int, embed_dims: int, drop_rate: float = 0.1, norm_cfg: dict = DEFAULT_NORM_CFG):
        super().__init__()
        self.ln1 = build_norm_layer(norm_cfg, input_dims)
        self.attn = PerformerAttention(input_dims, embed_dims, drop_rate=drop_rate)
        self.ln2 = build_norm_layer(norm_cfg, embed_dims)
        self.ffn = FFN(embed_dims, embed_dims, act_cfg=dict(type='GELU'),
                       dropout_layer=dict(type='Dropout', drop_prob=drop_rate))

    def forward(self, x: Tensor) -> Tensor:
        """`(B, N, input_dims)` to `(B, N, embed_dims)`."""
        x = self.attn(self.ln1(x))
        return self.ffn(self.ln2(x), identity=x)
