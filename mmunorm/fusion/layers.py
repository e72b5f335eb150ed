"""What replaces a norm after folding: nothing, or for a LayerNorm or RMSNorm the same norm without weights."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compat import add_safe_globals, is_compiling, rms_norm
from .scopes import check_scope


class FoldedAway:
    """Stands in a folded file for the weight of a norm, so that no loader puts the file into a model with norms.

    It looks like a tensor, but has no shape: each loader asks for that, and mmengine's would only log a wrong one.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.refuse()

    def refuse(self, *args):
        raise RuntimeError('this file is of a folded model, and the model that it is loaded into has norms. Build its '
                           'model with mmunorm.load_folded(path, model), or from the config in the file')

    shape = property(refuse)
    dtype = property(refuse)


add_safe_globals([FoldedAway])
NOT_SAVED = ('the model is folded, and from_pretrained would load its weights into a model that has the norms. Use '
             'mmunorm.save_folded(model, path) and mmunorm.load_folded(path, model)')


class Folded(nn.Module):
    """Marks a folded norm by its buffer `folded`, so that loading a folded checkpoint into an unfolded model, or the
    reverse, is an error.

    Args:
        added: names of the tensors that folding the norm added to the model's state_dict. Defaults to none.
        like: a tensor of the norm's dtype and device. Defaults to None, for torch's defaults.
    """
    is_folded = True
    channels_first = False  # whether the channels are the second dimension
    scope = None  # see `scopes`
    note = {'kind': 'identity'}  # what a file says about it: the arguments of :func:`built`

    def _set_up(self, width: int, added: Sequence[str], like: Tensor | None, linear: bool = False) -> None:
        self.added = tuple(added)
        options = {} if like is None else dict(dtype=like.dtype, device=like.device)
        self.register_buffer('folded', torch.ones((), **options))  # a float: averages of models average buffers, too
        # Models read the dtype and device of a norm from its parameters.
        for name, value in (('weight', torch.ones), ('bias', torch.zeros)):
            vars(self)['_parameters'].pop(name, None)
            self.register_buffer(name, value(width, **options), persistent=False)
        self.linear = nn.Linear(width, width).to(self.weight) if linear else None

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        if not isinstance(state_dict.pop(f'{prefix}weight', FoldedAway()), FoldedAway):
            raise RuntimeError(
                f'{prefix}weight: the model is folded, but this checkpoint is not. Load it into the '
                'unfolded model of its config, then call mmunorm.fuse_norms(model).')
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class FoldedNorm(Folded, nn.Identity):
    """Replaces a norm that has been folded."""

    def __init__(self, added: Sequence[str] = (), like: Tensor | None = None):
        super().__init__()
        self._set_up(0, added, like)

    def forward(self, x: Tensor, pad_mask: Optional[Tensor] = None,  # noqa: UP045, TorchScript reads it
                data_format: Optional[str] = None) -> Tensor:  # noqa: UP045
        """Returns `x`; accepts the other arguments of norms."""
        if not torch.jit.is_scripting():
            check_scope(self, x)
        return x


class FoldedLayerNorm(Folded, nn.LayerNorm):
    """What is left of a LayerNorm: `(x - mean) / sqrt(variance + eps)` for each token, without gamma and beta.

    Args:
        width (int): channels C of the `(..., C)` input.
        eps (float): added to the variance.
        is_centered (bool): whether the mean of each token is 0 already. Defaults to False.
        is_padded (bool): whether zeros are put between the tokens of the output, which the next layer has to tell from
            them: 1 is added to each channel, whose sum is 0 otherwise. Defaults to False.
        channels_first (bool): whether the input is maps `(N, C, H, W)`. Defaults to False.
        linear (bool): whether a linear layer `(C, C)` follows, where the output of the norm is read as it was. Defaults
            to False.
        added, like: as for :class:`Folded`.
    """

    def __init__(self, width: int, eps: float, is_centered: bool = False, is_padded: bool = False,
                 channels_first: bool = False, linear: bool = False, added: Sequence[str] = (),
                 like: Tensor | None = None):
        super().__init__(width, eps, elementwise_affine=False)
        self._set_up(width, added, like, linear)
        self.is_centered, self.is_padded, self.channels_first = is_centered, is_padded, channels_first
        if is_padded:
            self.bias.fill_(1)

    def forward(self, x: Tensor, data_format: str = 'channel_first') -> Tensor:
        """`(..., C)`; returns the same shape and dtype.

        `(N, C, H, W)` if `channels_first`, unless `data_format` is 'channel_last', as mmpretrain calls its LN2d.
        """
        is_map = self.channels_first and data_format == 'channel_first'
        x = x.movedim(1, -1) if is_map else x
        is_eager = False
        if not torch.jit.is_scripting():
            check_scope(self, x)
            # torch's kernel for CPUs takes 2.6 times as long without gamma and beta; a graph need not have them.
            is_eager = self.weight.device.type == 'cpu' and not torch.jit.is_tracing() and not is_compiling()
        if self.is_padded or is_eager:
            x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        else:
            x = F.layer_norm(x, self.normalized_shape, None, None, self.eps)
        if self.linear is not None:
            x = self.linear(x)
        return x.movedim(-1, 1) if is_map else x


class FoldedRMSNorm(Folded):
    """What is left of an RMSNorm: `x / sqrt(mean square + eps)` for each token, without gamma.

    Args:
        width (int): channels C of the `(..., C)` input.
        eps (float | None): added to the mean square; None for the smallest of the input's dtype, as torch has it.
        channels_first, linear, added, like: as for :class:`FoldedLayerNorm`.
    """

    def __init__(self, width: int, eps: float | None, channels_first: bool = False, linear: bool = False,
                 added: Sequence[str] = (), like: Tensor | None = None):
        super().__init__()
        self._set_up(width, added, like, linear)
        self.eps, self.channels_first = eps, channels_first

    def forward(self, x: Tensor) -> Tensor:
        """`(..., C)`, or `(N, C, H, W)` if `channels_first`; returns the same shape and dtype."""
        check_scope(self, x)
        x = x.movedim(1, -1) if self.channels_first else x
        if torch.jit.is_tracing():  # the TorchScript exporter has no rms_norm
            eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
            x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        else:
            x = rms_norm(x, None, self.eps)
        if self.linear is not None:
            x = self.linear(x)
        return x.movedim(-1, 1) if self.channels_first else x


_KINDS = dict(identity=FoldedNorm, layer_norm=FoldedLayerNorm, rms_norm=FoldedRMSNorm)


def built(kind: str, added: Sequence[str] = (), like: Tensor | None = None, **arguments) -> Folded:
    """What is left of a norm, by its note."""
    left = _KINDS[kind](added=added, like=like, **arguments)
    left.note = dict(kind=kind, **arguments)
    return left
