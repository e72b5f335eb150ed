"""PRepBN of SLAB (Guo et al., ICML 2024): LayerNorm that fades into RepBN."""
from __future__ import annotations

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.nn import functional as F

from mmunorm.norms import RepBN
from mmunorm.norms.base import check_count
from mmunorm.norms.kernels.reference import statistics_dtype
from mmunorm.norms.step import Step


@MODELS.register_module()
class PRepBN(RepBN):
    """`lambda * LN(x) + (1 - lambda) * RepBN(x)`, lambda falling linearly from 1 to 0.

    The first forward pass in training has lambda = 1, pass `steps + 1` and all later ones 0; then the norm can be
    folded. LayerNorm is computed until the mode first changes after that, at a validation at the latest. Inference
    blends with the lambda of the next training step.

    Its own state: `ln_weight` and `ln_bias` (C), LayerNorm's affine part. From a checkpoint without them, such as that
    of an LN model, they get the values of `weight` and `bias`. `replace_norms` does not copy them.

    Args:
        num_features (int): channels C of the `(..., C)` input.
        steps (int): forward passes of this layer in training until lambda is 0; several a step for a layer that runs
            several times, or with accumulated gradients.
        alpha, eps: as :class:`TokenBN`'s, with its defaults; `eps` is also LayerNorm's.
    """

    def __init__(self, num_features: int, steps: int, alpha: float = 0.9, eps: float = 1e-5):
        super().__init__(num_features, alpha=alpha, eps=eps)
        self.steps = check_count('steps', steps, minimum=1)
        self.ln_weight = nn.Parameter(torch.ones(num_features))
        self.ln_bias = nn.Parameter(torch.zeros(num_features))
        # Whether lambda is known to be 0: a training step must not wait for the device.
        self._has_faded = False

    @property
    def fold_obstacle(self) -> str:
        """Why the norm cannot be folded yet, or ''. Synchronizes with the device."""
        done = int(self.num_batches_tracked)
        if done >= self.steps:
            return ''
        return f'blends LayerNorm in until {self.steps} training steps are done, and has done {done}'

    def start_run(self, resumed: bool, steps: int) -> str:
        """Returns a warning if lambda will not reach 0. Every run continues from the step count."""
        remaining = self.steps - int(self.num_batches_tracked)
        if remaining <= steps:
            return ''
        return (f'PRepBN still blends LayerNorm in when this run ends, and cannot be folded then: it needs {remaining} '
                f'more training steps, and the run has {steps}. Set fewer steps in norm_cfg.')

    def train(self, mode: bool = True) -> PRepBN:
        """As torch's; a change of the mode checks how many steps are done, which synchronizes with the device."""
        if mode != self.training:
            self._check_faded()
        return super().train(mode)

    def restart_warmup(self) -> None:
        """Restarts at step 1, with lambda = 1."""
        super().restart_warmup()
        self._check_faded()

    def _check_faded(self) -> None:
        self._has_faded = int(self.num_batches_tracked) >= self.steps

    def _normalize_tokens(self, x: Tensor, valid: Tensor | None) -> Tensor:
        y = super()._normalize_tokens(x, valid)
        if self.training or self._has_faded:
            return y
        return self._blend(x, y, self.num_batches_tracked)

    def _new_step(self, x: Tensor, valid: Tensor | None) -> Step:
        return super()._new_step(x, valid)._replace(t=self.num_batches_tracked.clone())

    def _apply_step(self, step: Step, x: Tensor, valid: Tensor | None, bias: Tensor) -> Tensor:
        if self._has_faded:
            # DistributedDataParallel waits for the gradient of each parameter.
            return super()._apply_step(step, x, valid, bias + 0 * self.ln_weight + 0 * self.ln_bias)
        return self._blend(x, super()._apply_step(step, x, valid, bias), step.t - 1)

    def _blend(self, x: Tensor, y: Tensor, steps_before: Tensor) -> Tensor:
        dtype = statistics_dtype(x.dtype)
        ln = F.layer_norm(x.to(dtype), x.shape[-1:], self.ln_weight.to(dtype), self.ln_bias.to(dtype), self.eps)
        share = (1 - steps_before.to(ln.dtype) / self.steps).clamp(min=0)
        return (share * ln + (1 - share) * y.to(ln.dtype)).to(x.dtype)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        for name in ('weight', 'bias'):
            if prefix + name in state_dict:
                state_dict.setdefault(f'{prefix}ln_{name}', state_dict[prefix + name])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.lacks_statistics = False  # it starts as LayerNorm, and measures while that fades
        self._check_faded()

    def extra_repr(self) -> str:
        return f'{super().extra_repr()}, steps={self.steps}'
