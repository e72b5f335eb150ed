"""What replaces a norm after folding: nothing, or for a LayerNorm or RMSNorm the scale of each token."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..norms import Norm
from .affine import standardize
from .partial_calls import check_scope
from .replaced import watch_layers


@dataclass(frozen=True)
class StreamBasis:
    """The new basis of a residual stream; `restore` returns to the old one.

    Attributes:
        norms: names of the norms that read the stream.
        basis: Q, `(C, C)` float64; None for the identity.
        is_centered: whether the mean of each token was subtracted.
        has_mean_channel: whether channel 0 is sqrt(C) times the mean of a token, or 0 if it was subtracted.
    """
    norms: list[str]
    basis: Tensor | None
    is_centered: bool
    has_mean_channel: bool

    def restore(self, tokens: Tensor) -> Tensor:
        """Tokens `(..., C)` of the folded stream in the basis of the original model, without their mean if it is
        centered."""
        return tokens if self.basis is None else tokens @ self.basis.to(tokens)


class Folded(nn.Module):
    """Marks a folded norm by its buffer `folded`, so that loading a folded checkpoint into an unfolded model, or the
    reverse, is an error. Its `weight` and `bias` are empty.

    Args:
        added: names of the tensors that folding the norm added to the model's state_dict. Defaults to none.
        like: a tensor of the norm's dtype and device. Defaults to None, for torch's defaults.
    """
    folded_within = ''  # the mark of its scope, see `partial_calls`

    def __init__(self, added: Sequence[str] = (), like: Tensor | None = None):
        super().__init__()
        self.added = tuple(added)
        self.register_buffer('folded', torch.tensor(True))
        # Models read the dtype and device of a norm from its parameters.
        self.register_buffer('weight', torch.empty(0) if like is None else like.new_empty(0), persistent=False)

    @property
    def bias(self) -> Tensor:
        return self.weight

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        watch_layers()  # in the process that unpickles the model, too

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        if prefix + 'weight' in state_dict:
            raise RuntimeError(
                f'{prefix}weight: the model is folded, but this checkpoint is not. Load it into the '
                'unfolded model of its config, then call mmunorm.fuse_norms(model).')
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


Norm.refused_state['folded'] = (
    'this checkpoint is of a folded model, but this model has norms. First call '
    "mmunorm.fuse_norms(model.eval()), or build the model with mmunorm.load_folded.")


class FoldedNorm(Folded, nn.Identity):
    """Replaces a norm that has been folded."""

    def forward(self, x: Tensor, pad_mask: Tensor | None = None, data_format: str | None = None) -> Tensor:
        """Returns `x`; accepts the other arguments of norms."""
        if not torch.jit.is_scripting() and self.folded_within:
            check_scope(self)
        return x


class FoldedNormAct(FoldedNorm):
    """Replaces a folded norm of timm that includes an activation, which is kept."""

    def __init__(self, added: Sequence[str], norm: nn.Module):
        super().__init__(added, norm.running_var)
        self.drop, self.act = norm.drop, norm.act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(x))


class TokenScale(Folded):
    """What is left of a LayerNorm or RMSNorm whose linear parts are folded: `x / sqrt(v + eps)` for each token.

    v is, over the `width` channels of a token, its variance, or its mean square if the mean of the LayerNorm is folded
    into the layers before it. In a stream whose basis was changed so that channel 0 of a token is sqrt(C) times its
    mean, v leaves that channel out; a norm over k such tokens side by side subtracts the square of their common mean.

    Args:
        width (int): channels C of the `(..., C)` input.
        eps (float | None): added to v; None for the smallest of the input's dtype, as torch's RMSNorm has it.
        statistic (str): 'variance' or 'mean_square'.
        mean_channels (Sequence[int]): the channels that hold the mean of a token, one for each of the k tokens side by
            side. Defaults to none; not with 'variance'.
        channels_first (bool): whether the input is `(N, C, H, W)`. Defaults to False.
        affine (bool): whether gamma and beta stay, as `scale` and `shift`. Defaults to False.
        linear (bool): whether a linear layer `(C, C)` follows, where the output of the norm is the stream. Defaults to
            False.
        added, like: as for :class:`FoldedNorm`.
    """

    def __init__(self, width: int, eps: float | None, statistic: str, mean_channels: Sequence[int] = (),
                 channels_first: bool = False, affine: bool = False, linear: bool = False,
                 added: Sequence[str] = (), like: Tensor | None = None):
        super().__init__(added, like)
        self.arguments = dict(width=width, eps=eps, statistic=statistic, mean_channels=list(mean_channels),
                              channels_first=channels_first, affine=affine, linear=linear)
        self.eps, self.statistic, self.channels_first = eps, statistic, channels_first
        self.num_tokens, self.has_mean_channels = max(len(mean_channels), 1), bool(mean_channels)
        self.scale = nn.Parameter(torch.ones(width)) if affine else None
        self.shift = nn.Parameter(torch.zeros(width)) if affine else None
        self.linear = nn.Linear(width, width) if linear else None
        if mean_channels:
            squares = torch.full((1, width), 1 / width, dtype=torch.float64)
            means = torch.zeros_like(squares)
            if self.num_tokens == 1:
                squares[:, mean_channels] = 0
            means[:, list(mean_channels)] = (self.num_tokens * width)**-0.5
            self.register_buffer('square_weight', squares, persistent=False)
            self.register_buffer('mean_weight', means, persistent=False)
        self.to(self.weight)

    def forward(self, x: Tensor, data_format: str | None = None) -> Tensor:
        """`(..., C)`, or `(N, C, H, W)` if `channels_first`; returns the same shape and dtype."""
        if self.folded_within:
            check_scope(self)
        channels_first = self.channels_first and data_format != 'channel_last'
        x = x.movedim(1, -1) if channels_first else x
        x = self._scale_without_means(x) if self.has_mean_channels else standardize(x, self.statistic, self.eps)
        if self.scale is not None:
            x = x * self.scale + self.shift
        if self.linear is not None:
            x = self.linear(x)
        return x.movedim(-1, 1) if channels_first else x

    def _scale_without_means(self, x: Tensor) -> Tensor:
        # Squares of half precision overflow.
        is_half = x.dtype in (torch.float16, torch.bfloat16)
        with torch.autocast(x.device.type, enabled=False) if is_half else nullcontext():
            wide = x.float() if is_half else x
            v = F.linear(wide.square(), self.square_weight.to(wide.dtype))
            if self.num_tokens > 1:
                mean = F.linear(wide, self.mean_weight.to(wide.dtype))
                v = v - mean * mean  # `square` of a single number is POW in LiteRT, which has no integer kernel
            return (wide * (v + self.eps).rsqrt()).to(x.dtype)

    def extra_repr(self) -> str:
        return ', '.join(f'{name}={value}' for name, value in self.arguments.items() if value not in ((), [], False))


def set_streams(model: nn.Module, streams: Iterable[StreamBasis]) -> None:
    """Stores the changed residual streams of a model in their first norms."""
    for stream in streams:
        model.get_submodule(stream.norms[0]).stream = stream


def streams_of(model: nn.Module) -> tuple[StreamBasis, ...]:
    """The residual streams that are in another basis in a folded model, as in the report of its folding."""
    streams = (vars(module).get('stream') for module in model.modules())
    return tuple(stream for stream in streams if isinstance(stream, StreamBasis))


def refuse_save_pretrained(model: nn.Module) -> None:
    """Makes `save_pretrained` of folded models, such as those of transformers, an error."""
    for module in model.modules():
        if hasattr(type(module), 'save_pretrained') and any(isinstance(part, Folded) for part in module.modules()):
            module.save_pretrained = _refused_save_pretrained


def _refused_save_pretrained(*args, **kwargs):
    raise RuntimeError('save_pretrained: the model is folded, and from_pretrained would load its weights into a model '
                       'that has the norms. Use mmunorm.save_folded(model, path) and mmunorm.load_folded(path, model)')
