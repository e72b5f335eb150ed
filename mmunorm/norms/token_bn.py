"""BatchNorm over tokens, and the norms of SLAB (Guo et al., ICML 2024) that stand on it: spec section 2."""
from __future__ import annotations

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.nn import functional as F

from .base import check_count
from .kernels import statistics_dtype
from .offline import OfflineNorm
from .steps import Step, in_backward_pass


@MODELS.register_module()
class TokenBN(OfflineNorm):
    """BatchNorm over tokens: `torch.nn.BatchNorm1d` on `(tokens, C)`, with pad masks.

    Output, gradient, running statistics and the names in `state_dict` are torch's. One token alone has
    variance 0, where torch raises an error.

    Args:
        num_features (int): channels C of the `(..., C)` input.
        alpha (float): weight of the OLD value in the running statistics, in [0, 1); 1 minus torch's
            momentum. Defaults to 0.9.
        eps (float): added to the variance. Defaults to 1e-5.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self, num_features: int, alpha: float = 0.9, eps: float = 1e-5):
        super().__init__(num_features, centered=True, alpha=alpha, eps=eps)


@MODELS.register_module()
class RepBN(TokenBN):
    """`RepBN(x) = BN(x) + eta * x` with a learnable scalar `eta` that starts at 1, from SLAB.

    Arguments are those of :class:`TokenBN`. State: `eta` (1) beside its.
    """

    def __init__(self, num_features: int, alpha: float = 0.9, eps: float = 1e-5):
        super().__init__(num_features, alpha=alpha, eps=eps)
        self.eta = nn.Parameter(torch.ones(1))


@MODELS.register_module()
class PRepBN(RepBN):
    """`lambda * LN(x) + (1 - lambda) * RepBN(x)`, lambda falling linearly from 1 to 0: SLAB's PRepBN.

    The first training step has lambda = 1, step `steps + 1` and all later ones 0. Then the norm can be folded
    and no LayerNorm is computed: from the first step on at whose beginning no backward pass is due (under
    torch.compile, from the next call of `train()` or `eval()` on). Inference blends with the lambda of the
    next training step.

    Its own state: `ln_weight` and `ln_bias` (C), LayerNorm's affine part; a checkpoint that lacks them,
    such as one of an LN model, gives them the values of `weight` and `bias`.

    Args:
        num_features (int): channels C of the `(..., C)` input.
        steps (int): training steps until lambda is 0.
        alpha (float): weight of the OLD value in the running statistics, in [0, 1). Defaults to 0.9.
        eps (float): added to the variance, of LayerNorm too. Defaults to 1e-5.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self, num_features: int, steps: int, alpha: float = 0.9, eps: float = 1e-5):
        super().__init__(num_features, alpha=alpha, eps=eps)
        self.steps = check_count('steps', steps, least=1)
        self.ln_weight = nn.Parameter(torch.ones(num_features))
        self.ln_bias = nn.Parameter(torch.zeros(num_features))
        # `num_batches_tracked` for the host, which must not wait for a device in training, and what it tells:
        # whether lambda is 0. A compiled graph reads only the latter; it would be compiled anew for each int.
        self._steps_seen = 0
        self._is_finished = False

    @property
    def fold_obstacle(self) -> str:
        """Why the norm cannot be folded yet, or ''. Waits for the device."""
        seen = self.num_batches_tracked.item()
        if seen >= self.steps:
            return ''
        return f'blends LayerNorm in until {self.steps} training steps are done, and has done {seen}'

    @property
    def newest_step(self) -> None:
        """None: a step does not tell what LayerNorm has added."""
        return None

    def _normalize(self, x: Tensor, pad_mask: Tensor | None) -> Tensor:
        y = super()._normalize(x, pad_mask)
        if self.training or self._is_finished:
            return y
        return self._blend(x, y, self.num_batches_tracked)

    def _step(self, x: Tensor, valid: Tensor | None) -> Step:
        # A recomputed forward must do what the first did.
        if not (torch.compiler.is_compiling() or in_backward_pass() or self._pending.wait()):
            self._is_finished = self._steps_seen >= self.steps
        return super()._step(x, valid)

    def _new_step(self, x: Tensor, valid: Tensor | None) -> Step:
        if not torch.compiler.is_compiling():
            self._steps_seen += 1
        return super()._new_step(x, valid)

    def _apply_step(self, step: Step, x: Tensor, valid: Tensor | None, bias: Tensor) -> Tensor:
        if self._is_finished:
            # DistributedDataParallel wants a gradient for every parameter.
            return super()._apply_step(step, x, valid, bias + 0 * self.ln_weight + 0 * self.ln_bias)
        return self._blend(x, super()._apply_step(step, x, valid, bias), step.t - 1)

    def train(self, mode: bool = True) -> PRepBN:
        """As torch's; a change of the mode looks how many steps are done, which waits for the device."""
        if mode != self.training:
            self._read_steps()
        self._is_finished = self._steps_seen >= self.steps
        return super().train(mode)

    def _read_steps(self) -> None:
        self._steps_seen = int(self.num_batches_tracked)
        self._is_finished = self._steps_seen >= self.steps

    def _blend(self, x: Tensor, y: Tensor, steps_before: Tensor) -> Tensor:
        dtype = statistics_dtype(x.dtype)
        share = (1 - steps_before.to(dtype) / self.steps).clamp(min=0)
        ln = F.layer_norm(
            x.to(dtype), (self.num_features, ), self.ln_weight.to(dtype), self.ln_bias.to(dtype), self.eps)
        return (share * ln + (1 - share) * y.to(dtype)).to(x.dtype)

    def restart_warmup(self) -> None:
        """Begins again at step 1, with lambda = 1."""
        super().restart_warmup()
        self._read_steps()

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        for name in ('weight', 'bias'):
            if prefix + name in state_dict:
                state_dict.setdefault(f'{prefix}ln_{name}', state_dict[prefix + name])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._read_steps()

    def extra_repr(self) -> str:
        return f'{super().extra_repr()}, steps={self.steps}'
