"""The Transformer for translation (arXiv 1706.03762) with replaceable norms and residuals."""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from mmcv.cnn import build_activation_layer
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from mmpretrain.models.utils import build_norm_layer
from torch import Tensor, nn

from mmunorm.norms.base import check_count
from mmunorm.utils import PreflightError
from projects.deep.deep import residuals
from projects.deep.deep.residuals.sublayer import PreLinear, Sublayer, call_norm, describe

from .text.ids import PAD

ARCHS = {
    'small': dict(encoder_layers=6, decoder_layers=6, embed_dims=512, feedforward_channels=1024, num_heads=4),
    'base': dict(encoder_layers=6, decoder_layers=6, embed_dims=512, feedforward_channels=2048, num_heads=8),
    'big': dict(encoder_layers=6, decoder_layers=6, embed_dims=1024, feedforward_channels=4096, num_heads=16),
}
Cache = dict[str, tuple[Tensor, Tensor]]


class Memory(NamedTuple):
    """The encoder's output `(N, S, C)`, and its mask `(N, S)`, True where a token is padding, or None."""
    tokens: Tensor
    pad_mask: Tensor | None


def _last_linear(last: nn.Module, x: Tensor, pad_mask: Tensor | None) -> Tensor:
    """The last linear layer of a sublayer, with the modules of a residual scheme before it."""
    return last(x, pad_mask) if isinstance(last, PreLinear) else last(x)


class Attention(nn.Module):
    """Base class of both attentions, with the heads and the output layer `out`."""

    def __init__(self, embed_dims: int, num_heads: int, dropout: float):
        super().__init__()
        self.num_heads = num_heads
        self.out = nn.Linear(embed_dims, embed_dims)
        self.drop = nn.Dropout(dropout)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, causal: bool) -> Tensor:
        """`(N, H, T, d)` to `(N, T, C)`; `hidden` `(N, S)` is True for masked keys."""
        mask = None if hidden is None else ~hidden[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2).flatten(2)


class SelfAttention(Attention):
    """Self-attention. If `causal`, a token attends only to itself and earlier tokens."""

    def __init__(self, embed_dims: int, num_heads: int, dropout: float, causal: bool):
        super().__init__(embed_dims, num_heads, dropout)
        self.causal = causal
        self.qkv = nn.Linear(embed_dims, 3 * embed_dims)

    def describe(self) -> Sublayer:
        """The parts, for a residual scheme."""
        return Sublayer(self, self.qkv, ('q', 'k', 'v'), self, 'out', 'out', self, 'drop')

    def forward(self, x: Tensor, pad_mask: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """`(N, T, C)` to the same; with a `cache`, `x` is one token after those whose keys and values are in it."""
        q, k, v = map(self._heads, self.qkv(x).chunk(3, -1))
        if cache is not None:
            if 'self' in cache:
                k, v = (torch.cat(pair, dim=2) for pair in zip(cache['self'], (k, v), strict=True))
            cache['self'] = k, v
        # Padding is on the right, so the causal mask also hides it.
        hidden = None if self.causal else pad_mask
        return self.drop(_last_linear(self.out, self._attend(q, k, v, hidden, self.causal and cache is None), pad_mask))


class CrossAttention(Attention):
    """Attention of the decoder to the encoder's output."""

    def __init__(self, embed_dims: int, num_heads: int, dropout: float):
        super().__init__(embed_dims, num_heads, dropout)
        self.q = nn.Linear(embed_dims, embed_dims)
        self.kv = nn.Linear(embed_dims, 2 * embed_dims)

    def describe(self) -> Sublayer:
        """The parts, for a residual scheme."""
        return Sublayer(self, self.q, ('q', ), self, 'out', 'out', self, 'drop', memory=self.kv)

    def forward(self, x: Tensor, memory: Memory, pad_mask: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """`(B N, T, C)` to the same, with B consecutive sequences for each of the N of `memory`."""
        cache = {} if cache is None else cache
        if 'memory' not in cache:
            cache['memory'] = tuple(map(self._heads, self.kv(memory.tokens).chunk(2, -1)))
        k, v = cache['memory']
        q = self._heads(self.q(x).reshape(len(k), -1, x.shape[-1]))
        y = self._attend(q, k, v, memory.pad_mask, causal=False).view(x.shape)
        return self.drop(_last_linear(self.out, y, pad_mask))


class FeedForward(nn.Module):
    """Two linear layers with an activation in between."""

    def __init__(self, embed_dims: int, channels: int, act_cfg: dict, dropout: float):
        super().__init__()
        self.fc1 = nn.Linear(embed_dims, channels)
        self.act = build_activation_layer(act_cfg)
        self.fc2 = nn.Linear(channels, embed_dims)
        self.drop = nn.Dropout(dropout)

    def describe(self) -> Sublayer:
        """The parts, for a residual scheme."""
        return Sublayer(self, self.fc1, ('fc1', ), self, 'fc2', 'fc2', self, 'drop')

    def forward(self, x: Tensor, pad_mask: Tensor | None = None) -> Tensor:
        """`(N, T, C)` to the same."""
        return self.drop(_last_linear(self.fc2, self.act(self.fc1(x)), pad_mask))


class EncoderLayer(residuals.ResidualLayer):
    """Self-attention and a feed-forward network, with the connections of a residual scheme."""
    norm_names = ('norm1', 'norm2')

    def __init__(self, arch: dict, norm_cfg: dict, act_cfg: dict, dropout: float, causal: bool = False):
        super().__init__()
        width = arch['embed_dims']
        self.attn = SelfAttention(width, arch['num_heads'], dropout, causal)
        self.ffn = FeedForward(width, arch['feedforward_channels'], act_cfg, dropout)
        for name in self.norm_names:
            self.add_module(name, build_norm_layer(norm_cfg, width))

    def forward(self, x: Tensor, pad_mask: Tensor | None) -> Tensor:
        """`(N, S, C)` to the same; `pad_mask` `(N, S)` is True where a token is padding."""
        x = self.residual1(x, lambda x: self.attn(x, pad_mask), self.norm1, pad_mask)
        return self.residual2(x, lambda x: self.ffn(x, pad_mask), self.norm2, pad_mask)


class DecoderLayer(EncoderLayer):
    """Causal self-attention, attention to the encoder, and a feed-forward network."""
    part_names = ('attn', 'cross_attn', 'ffn')
    norm_names = ('norm1', 'norm2', 'norm3')

    def __init__(self, arch: dict, norm_cfg: dict, act_cfg: dict, dropout: float):
        super().__init__(arch, norm_cfg, act_cfg, dropout, causal=True)
        self.cross_attn = CrossAttention(arch['embed_dims'], arch['num_heads'], dropout)

    def forward(self, x: Tensor, pad_mask: Tensor | None, memory: Memory, cache: Cache | None = None) -> Tensor:
        """`(N, T, C)` to the same; `cache` as in :meth:`UNTransformer.decode`."""
        x = self.residual1(x, lambda x: self.attn(x, pad_mask, cache), self.norm1, pad_mask)
        x = self.residual2(x, lambda x: self.cross_attn(x, memory, pad_mask, cache), self.norm2, pad_mask)
        return self.residual3(x, lambda x: self.ffn(x, pad_mask), self.norm3, pad_mask)


@MODELS.register_module()
class UNTransformer(BaseModule):
    """Encoder and decoder with `norm_cfg` in every norm, and `residual_cfg` in every residual.

    Token ids are those of :mod:`.text.ids`. Padding is on the right, and does not affect outputs or statistics.
    Position encodings are sines in the first half of the channels and cosines in the second. The embedding of source
    and target, times `sqrt(C)`, is shared with the output layer.

    Args:
        vocab_size (int): tokens V, of both languages together.
        arch (str | dict): 'small' (6 + 6 layers of width 512, 1024 in the feed-forward networks, 4 heads), 'base'
            (6 + 6, 512, 2048, 8), 'big' (6 + 6, 1024, 4096, 16), or a dict of `encoder_layers`, `decoder_layers`,
            `embed_dims`, `feedforward_channels` and `num_heads`. Defaults to 'base'.
        norm_cfg (dict): config of every norm. Defaults to `dict(type='UN')`, and to `dict(type='NoNorm')` for the
            schemes without norms.
        residual_cfg (dict): config of every residual, as in :class:`projects.deep.deep.UNVisionTransformer`. Linear
            layers start as Xavier's, unless the scheme has initial weights. Defaults to `dict(type='PreNorm')`.
        act_cfg (dict): config of the activation. Defaults to `dict(type='ReLU')`.
        dropout (float): dropout of the embedding and of each sublayer's output. Defaults to 0.1.
        init_cfg (dict, optional): initialization config, such as a checkpoint. Defaults to None.

    Raises:
        ValueError: `vocab_size` or `arch` is invalid.
        TypeError: `norm_cfg` is not a dict with a `type`.
        ResidualError: `residual_cfg` names no scheme or a wrong argument, or does not go with the norms.
    """

    def __init__(self, vocab_size: int, arch: str | dict = 'base', *, norm_cfg: dict = residuals.DEFAULT_NORM_CFG,
                 residual_cfg: dict = residuals.DEFAULT_RESIDUAL_CFG,
                 act_cfg: dict = dict(type='ReLU'),  # noqa: B006  as everywhere in OpenMMLab
                 dropout: float = 0.1, init_cfg: dict | None = None):
        super().__init__(init_cfg)
        self.vocab_size = check_count('vocab_size', vocab_size, minimum=5)
        self.arch = _check_arch(arch)
        norm_cfg = residuals.norm_of(residual_cfg, norm_cfg)
        scheme = residuals.scheme_of(residual_cfg)
        width = self.arch['embed_dims']
        self.embedding = nn.Embedding(vocab_size, width)
        self.drop = nn.Dropout(dropout)
        stacks = self.arch['encoder_layers'], self.arch['decoder_layers']
        for name, cls, depth in (('encoder', EncoderLayer, stacks[0]), ('decoder', DecoderLayer, stacks[1])):
            layers = nn.ModuleList(cls(self.arch, norm_cfg, act_cfg, dropout) for _ in range(depth))
            residuals.connect(self, layers, cls, residual_cfg, norm_cfg, stacks, in_decoder=name == 'decoder')
            self.add_module(name, layers)
            self.add_module(f'{name}_norm', build_norm_layer(norm_cfg, width) if scheme.final_norm else nn.Identity())
        self.output = nn.Linear(width, vocab_size, bias=False)
        self.output.weight = self.embedding.weight
        self._initialize()

    def init_weights(self) -> None:
        """Initializes the weights, or loads those of the checkpoint in `init_cfg`."""
        self._initialize()
        super().init_weights()

    @torch.no_grad()
    def _initialize(self) -> None:
        nn.init.normal_(self.embedding.weight, std=self.embedding.embedding_dim**-0.5)
        for layers, embedding in ((self.encoder, self.embedding), (self.decoder, None)):
            for layer in layers:
                for part in layer.part_names:
                    sublayer = describe(getattr(layer, part))
                    for weight in sublayer.weights().values():
                        nn.init.xavier_uniform_(weight)
                    for bias in sublayer.biases():
                        bias.zero_()
            residuals.initialize(self, layers, embedding)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Ids `(N, S)` and `(N, T)`, int64, to the logits of the next token after each token of the target.

        The target begins with BOS and has no EOS. The logits are `(N, T', V)`, T' of the longest target; those of
        padded tokens are undefined.

        Raises:
            ValueError: a row has no token.
        """
        memory = self.encode(source)
        target, pad_mask = trim(target, 'target')
        return self.decode(target, memory, pad_mask)

    def encode(self, source: Tensor) -> Memory:
        """Encodes ids `(N, S)` for the decoder.

        Raises:
            ValueError: a row has no token.
        """
        source, pad_mask = trim(source, 'source')
        x = self._embed(source)
        for layer in self.encoder:
            x = layer(x, pad_mask)
        return Memory(call_norm(self.encoder_norm, x, pad_mask), pad_mask)

    def decode(self, target: Tensor, memory: Memory, pad_mask: Tensor | None = None, cache: list[Cache] | None = None,
               position: int = 0) -> Tensor:
        """The logits `(N, T, V)` after each token of the target, ids `(N, T)`.

        Args:
            target: ids, or `(B N, T)` with B consecutive rows for each row of `memory`.
            memory: the result of :meth:`encode`.
            pad_mask: `(N, T)`, True where a token is padding.
            cache: a dict for each layer with the keys and values of earlier tokens, to which `target` (T = 1) is
                appended, and of `memory`. With None, `target` is the whole prefix.
            position: position of the first token.
        """
        x = self._embed(target, position)
        for i, layer in enumerate(self.decoder):
            x = layer(x, pad_mask, memory, None if cache is None else cache[i])
        return self.output(call_norm(self.decoder_norm, x, pad_mask))

    def _embed(self, tokens: Tensor, position: int = 0) -> Tensor:
        x = self.embedding(tokens) * self.embedding.embedding_dim**0.5
        return self.drop(x + sinusoids(tokens.shape[1], x.shape[-1], position).to(x))

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        weight = state_dict.get(f'{prefix}embedding.weight')
        if weight is not None and len(weight) != self.vocab_size:
            raise PreflightError(f'the checkpoint has a vocabulary of {len(weight)} tokens, but the config has '
                                 f'vocab_size={self.vocab_size}: it was trained with other subwords.')
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def trim(tokens: Tensor, name: str) -> tuple[Tensor, Tensor | None]:
    """Ids `(N, L)` without columns of padding only, and the mask of the remaining padding, or None.

    Raises:
        ValueError: a row has no token; the message has `name`.
    """
    lengths = tokens.ne(PAD).sum(dim=1).tolist()
    if min(lengths) == 0:
        raise ValueError(f'{name}: each row must have a token, but row {lengths.index(0)} has only padding')
    tokens = tokens[:, :max(lengths)]
    return tokens, tokens.eq(PAD) if min(lengths) < max(lengths) else None


def sinusoids(length: int, width: int, start: int = 0) -> Tensor:
    """Positions `start`, `start + 1`, ... as `(length, width)` float64: sines, then cosines."""
    angles = torch.arange(start, start + length, dtype=torch.float64)[:, None] * 10000**(
        -torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def _check_arch(arch: str | dict) -> dict:
    if isinstance(arch, str):
        if arch not in ARCHS:
            raise ValueError(f'arch must be one of {", ".join(map(repr, ARCHS))} or a dict, got {arch!r}')
        return ARCHS[arch]
    arch, names = {key: value for key, value in arch.items() if key != '_scope_'}, ARCHS['base']
    if arch.keys() != names.keys():
        raise ValueError(f'arch must have {", ".join(names)}, got {", ".join(map(str, arch)) or "nothing"}')
    for name, value in arch.items():
        check_count(f'arch: {name}', value, minimum=1)
    if arch['embed_dims'] % arch['num_heads'] or arch['embed_dims'] % 2:
        raise ValueError(f"arch: embed_dims must be even and a multiple of num_heads={arch['num_heads']}, "
                         f"got {arch['embed_dims']}")
    return arch
