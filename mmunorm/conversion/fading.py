"""A norm that is LayerNorm first and an offline norm in the end, for fine-tuning from a LayerNorm checkpoint."""
from __future__ import annotations

import math
import re
from collections.abc import MutableMapping

import torch
from mmengine.dist import all_reduce
from mmengine.registry import MODELS
from torch import Tensor

from ..norms import MABN, UN, Norm, OfflineNorm, RepBN, TokenBN
from ..norms.algorithm import Step
from ..norms.prep_bn import layer_norm
from .statistics import NUM_SUMS, mean_and_square, nearest_affine, token_sums, valid_tokens

# What a norm has beside the one that it becomes.
_EXTRA = ('ln_weight', 'ln_bias', 'fade', 'sums')


class FadingNorm(OfflineNorm):
    """`g * LN(x) + (1 - g) * norm(x)`, mixed into a class of offline norms: FadingUN and its peers.

    `g = (1 + cos(pi * done / steps)) / 2`. Before the first step of its fade the norm is exactly LayerNorm and
    computes nothing else; after the last it is exactly the other norm. :class:`mmunorm.engine.FadingHook` counts the
    steps. A LayerNorm checkpoint loads by name. So does one of the offline norm alone, which has faded.

    State, beside that of the offline norm: parameters `ln_weight` and `ln_bias` (C), LayerNorm's own; buffers `fade`
    (2), the steps of the fade that are done and how many it has, and `sums` (6, C) float64, what :meth:`refit` needs.
    :func:`drop_faded` takes them out of a state_dict.

    Args:
        num_features (int): channels C of the `(..., C)` input.
        ln_eps (float): LayerNorm's eps; 1e-6 in a Vision Transformer. Defaults to 1e-5.
        **kwargs: the other arguments of the offline norm.

    Attributes:
        measures (bool): whether forward passes add to `sums`.
        has_begun (bool): whether the norm is no longer LayerNorm alone.
        has_faded (bool): whether nothing is left of LayerNorm.
    """

    measures = False
    has_begun = False
    has_faded = False
    _fade = (0, 1)

    def __init__(self, num_features: int, ln_eps: float = 1e-5, **kwargs):
        super().__init__(num_features, **kwargs)
        self.ln_eps = ln_eps
        self.ln_weight = torch.nn.Parameter(torch.ones(num_features))
        self.ln_bias = torch.nn.Parameter(torch.zeros(num_features))
        self.register_buffer('fade', torch.tensor([0, 1]))
        self.register_buffer('sums', torch.zeros(NUM_SUMS, num_features, dtype=torch.float64))

    def set_fade(self, done: int, steps: int) -> None:
        """Sets how many steps of the fade are done, and how many it has."""
        if (done, steps) != self._fade:
            self.fade.copy_(torch.tensor([done, steps]))
            self._look()

    def _look(self) -> None:
        """Reads `fade`, which a forward pass must not wait for."""
        done, steps = self._fade = tuple(self.fade.tolist())
        # Bools, because torch.compile compiles anew for each new int.
        self.has_begun, self.has_faded = done > 0, done >= steps

    @property
    def fold_obstacle(self) -> str:
        """Why the norm cannot be folded yet, or ''."""
        if self.has_faded:
            return ''
        return 'is LayerNorm in part until its fade is over, of which {} of {} steps are done'.format(*self._fade)

    def set_progress(self, done: int, steps: int) -> None:
        """As :class:`OfflineNorm`'s, but a warm-up that is a share of the run begins with the fade."""
        if isinstance(self.warmup_iters, float):
            self.unsettled = self._settles_after(round(self.warmup_iters * steps))

    @property
    def newest_step(self) -> Step | None:
        """As :class:`OfflineNorm`'s; None as long as LayerNorm has a part."""
        return super().newest_step if self.has_faded else None

    @property
    def blends_another(self) -> bool:
        """Whether LayerNorm still has a part in the output."""
        return not self.has_faded

    @torch.no_grad()
    def refit(self) -> None:
        """Makes the offline part the nearest map to LayerNorm on the tokens of `sums`, and empties these.

        In a distributed run, all processes' tokens count, and all have to call it. Without any token nothing changes.
        """
        sums = self.sums.double()
        all_reduce(sums)
        if sums[0, 0] > 0:
            gamma, beta = self.ln_weight.double(), self.ln_bias.double()
            # 2^-23: autocast's tokens, too, are sums of float32.
            a, b = nearest_affine(sums, gamma, beta, torch.finfo(torch.float32).eps)
            self.set_affine(a, b, *mean_and_square(sums))
        self.sums.zero_()

    def _normalize(self, x: Tensor, pad_mask: Tensor | None) -> Tensor:
        if self.measures:
            with torch.no_grad():
                sums = token_sums(valid_tokens(x, pad_mask), self.ln_eps)
                # A step that overflows says nothing.
                self.sums.add_(torch.where(sums.isfinite().all(), sums, 0))
        if self.has_faded:
            return super()._normalize(x, pad_mask)
        if not self.has_begun:
            # DistributedDataParallel wants a gradient for every parameter.
            rest = [value for name, value in self.named_parameters() if not name.startswith('ln_')]
            bias = self.ln_bias + 0 * sum(rest) if self.training else self.ln_bias
            return layer_norm(x, self.ln_weight, bias, self.ln_eps).to(x.dtype)
        ln = layer_norm(x, self.ln_weight, self.ln_bias, self.ln_eps)
        share = (1 + torch.cos(math.pi * self.fade[0] / self.fade[1])) / 2
        y = super()._normalize(x, pad_mask)
        return (share * ln + (1 - share) * y.to(ln.dtype)).to(x.dtype)

    def _apply_step(self, step: Step, x: Tensor, valid: Tensor | None, bias: Tensor) -> Tensor:
        if self.has_faded:
            bias = bias + 0 * self.ln_weight + 0 * self.ln_bias
        return super()._apply_step(step, x, valid, bias)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        if prefix + 'weight' in state_dict and prefix + 'fade' not in state_dict:
            has_faded = prefix + 'running_var' in state_dict
            for name in ('weight', 'bias'):
                if prefix + name in state_dict:
                    state_dict[f'{prefix}ln_{name}'] = state_dict[prefix + name]
            state_dict[prefix + 'fade'] = torch.tensor([int(has_faded), 1])
            # What LayerNorm lacks is measured before it is used.
            for name, value in () if has_faded else [*self.named_parameters(), *self.named_buffers()]:
                state_dict.setdefault(prefix + name, value.detach().clone())
            state_dict.setdefault(prefix + 'sums', torch.zeros_like(self.sums))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.lacks_statistics = False
        if self.fade.device.type != 'meta':
            self._look()

    @property
    def refused_state(self) -> dict[str, str]:
        """As the other norms', which refuse one that has not faded."""
        return {name: why for name, why in Norm.refused_state.items() if name != 'fade'}

    def extra_repr(self) -> str:
        return '{}, ln_eps={}, {} of {} steps faded'.format(super().extra_repr(), self.ln_eps, *self._fade)


for _norm in (UN, MABN, TokenBN, RepBN):
    MODELS.register_module(name=f'Fading{_norm.__name__}',
                           module=type(f'Fading{_norm.__name__}', (FadingNorm, _norm), {'__doc__': FadingNorm.__doc__}))

Norm.refused_state['fade'] = (
    'in this checkpoint the norm is LayerNorm in part. Train on until its fade is over, or build the model with the '
    'norm_cfg of the run, such as FadingUN.')


def drop_faded(state_dict: MutableMapping[str, Tensor]) -> None:
    """Takes what is left of LayerNorm out of a state_dict, in place, for each norm that has faded."""
    for key in [key for key in state_dict if key.endswith('.fade')]:
        done, steps = state_dict[key].tolist()
        if done >= steps:
            for name in _EXTRA:
                state_dict.pop(f'{key.removesuffix("fade")}{name}', None)


def fading_order(names: list[str]) -> list[str]:
    """The order in which norms fade, of the names of a model's norms from front to back.

    First the second norm of each block, then the first ones, then those of patch embedding and merging, last the
    output norms: those beside which the blocks are, not in one of them.
    """
    def place(name: str) -> int:
        prefix = name[:name.rfind('.') + 1]
        is_in_a_block = re.search(r'\.\d+\.$', prefix)
        if not is_in_a_block and any(other.startswith(prefix) and '.' in other[len(prefix):] for other in names):
            return 3
        return {'norm2': 0, 'ln2': 0, 'norm1': 1, 'ln1': 1}.get(name[len(prefix):], 2)

    return sorted(names, key=place)
