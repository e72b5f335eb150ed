"""The state of an offline norm: its buffers, its affine map at inference, and its warm-up."""
from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from .averages import moving_average
from .base import Norm, check_choice, check_positive
from .recompute import PendingSteps


class OfflineState(Norm):
    """Parameters, buffers and warm-up of an offline norm.

    Parameters are `weight` (gamma), `bias` (beta) and, if requested, `eta` (1). Buffers are `running_var` and
    `num_batches_tracked` (training forward passes, as in torch's BatchNorm); with `centered` also `running_mean`; and
    `activation_record` (M, C), `gradient_record` (M, C), `psi` (C) and `num_outliers` (outlier steps), if the averages
    need them. Statistics are in float32, or in float64 after `.double()`: `.half()` and `.to(torch.bfloat16)` change
    the parameters alone, because a mean square of more than 65,504 is infinite in float16.

    Args:
        num_features, alpha, warmup_iters, eps, centered, eta: as :class:`UN`'s.
        activations, gradients (int): rows of `activation_record` and `gradient_record`; 0 for none.
        has_psi, counts_outliers (bool): whether there are `psi` and `num_outliers`.

    Attributes:
        lacks_statistics (bool): whether the state that was loaded last had `weight` and no running statistics, so
            that it came from another kind of norm.
        exact_steps (int, optional): the steps at the start that use their own statistics and the exact gradient: the
            warm-up, or until the records are full. None until the length of the run is known.
    """

    lacks_statistics = False
    running_mean: Tensor | None
    running_var: Tensor
    num_batches_tracked: Tensor
    activation_record: Tensor | None
    gradient_record: Tensor | None
    psi: Tensor | None
    num_outliers: Tensor | None

    def __init__(self, num_features: int, alpha: float, warmup_iters: int | float | None, eps: float,
                 centered: bool | str = False, eta: float | None = None, activations: int = 0, gradients: int = 0,
                 has_psi: bool = False, counts_outliers: bool = False):
        super().__init__(num_features)
        if not 0 <= alpha < 1:
            raise ValueError('alpha must be in [0, 1), the weight of the old value (0.9 keeps 90 % of it), '
                             f'got {alpha!r}')
        self.alpha = alpha
        is_share = isinstance(warmup_iters, float) and 0 < warmup_iters < 1
        if not (warmup_iters is None or is_share or type(warmup_iters) is int and warmup_iters >= 0):
            raise ValueError('warmup_iters must be a number of steps, an int of at least 0, or a share of the run, a '
                             f'float between 0 and 1, got {warmup_iters!r}')
        self.warmup_iters = warmup_iters
        self.eps = check_positive('eps', eps)
        self.centered = check_choice('centered', centered, (False, True, 'frozen'))
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_parameter('eta', None if eta is None else nn.Parameter(torch.tensor([float(eta)])))
        # A buffer that is None has no entry in the state_dict.
        for name, value in dict(
                running_mean=torch.zeros(num_features) if centered else None,
                running_var=torch.ones(num_features),
                num_batches_tracked=torch.tensor(0, dtype=torch.long),
                activation_record=torch.ones(activations, num_features) if activations else None,
                gradient_record=torch.zeros(gradients, num_features) if gradients else None,
                psi=torch.zeros(num_features) if has_psi else None,
                num_outliers=torch.tensor(0, dtype=torch.long) if counts_outliers else None).items():
            self.register_buffer(name, None if value is None else _at_least_float32(value))
        self._steps_of_records = max(activations, gradients)
        self.exact_steps = None if is_share else max(warmup_iters or 0, self._steps_of_records)
        self._pending = PendingSteps()

    def affine(self) -> tuple[Tensor, Tensor]:
        """`scale` and `shift` of the norm at inference, `y = scale * x + shift` (Eq. 1): two `(C,)` float64 tensors.

        Raises:
            RuntimeError: the norm has a `fold_obstacle`.
        """
        if self.fold_obstacle:
            raise RuntimeError(f'{type(self).__name__} is not an affine map: it {self.fold_obstacle}')
        scale, shift = self.scale_and_shift(torch.float64)  # a subclass has it
        return scale.detach(), shift.detach()

    @torch.no_grad()
    def set_affine(self, scale: Tensor, shift: Tensor, mean: Tensor, square: Tensor) -> None:
        """Makes the norm `y = scale * x + shift` at inference, and one that has seen no step; the inverse of `affine`.

        The running statistics and every row of the record of activations become those of tokens with `mean` E[x] and
        `square` E[x^2], and `eta` 0. All arguments are `(C,)`.
        """
        self.lacks_statistics = False
        self.restart_warmup()
        if self.running_mean is not None:
            self.running_mean.copy_(mean)
            shift = shift + scale * self.running_mean.to(scale.dtype)
        self.set_statistics(mean, square)
        if self.eta is not None:
            self.eta.zero_()
        # From the statistics as they are stored, which may be less precise.
        self.weight.copy_(scale * (self.running_var.to(scale.dtype) + self.eps).sqrt())
        self.bias.copy_(shift)

    @torch.no_grad()
    def set_statistics(self, mean: Tensor, square: Tensor) -> None:
        """Sets the running statistics, and every row of the record of activations, to those of some tokens.

        `mean` E[x] and `square` E[x^2] of :meth:`statistics_input` are `(C,)`. Frozen means do not change.
        """
        variance = square
        if self.running_mean is not None:
            if self.centered != 'frozen':
                self.running_mean.copy_(mean)
            mu = self.running_mean.to(square.dtype)
            variance = (square - (2 * mean - mu) * mu).clamp(min=0)  # E[(x - mu)^2]
        self.running_var.copy_(variance)
        if self.activation_record is not None:
            self.activation_record.copy_(variance.expand_as(self.activation_record))

    def statistics_input(self, x: Tensor) -> Tensor:
        """The tokens whose statistics the norm keeps, from its input `(..., C)`."""
        return x

    @property
    def is_fresh(self) -> bool:
        """Whether the running statistics are still those that the norm was built with."""
        return not self.num_batches_tracked and bool((self.running_var == 1).all())

    def _apply(self, fn, recurse=True):
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, after in self.named_buffers(recurse=False):
            if _at_least_float32(after) is not after:
                setattr(self, name, before[name].to(after.device, torch.float32))  # not rounded
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for name, buffer in self.named_buffers(recurse=False):  # `assign=True` takes those of the checkpoint
            setattr(self, name, _at_least_float32(buffer))
        if prefix + 'weight' in state_dict:
            self.lacks_statistics = prefix + 'running_var' not in state_dict
        if not self.running_var.is_meta and not self.running_var.isfinite().all():
            warnings.warn(f'{prefix}running_var is not finite, as in a checkpoint that was saved in float16: '
                          'mmunorm.update_norms(model, batches) measures it again', stacklevel=2)

    def _center(self, statistics: Tensor) -> tuple[Tensor, Tensor | None]:
        """The statistic about `mu_hat`, and `mu_hat`: None for 0, with `centered` the mean of this step.

        `statistics` are the mean square `(C,)`, with `centered` variance and mean `(2, C)`. Updates `running_mean`.
        """
        if self.running_mean is None:
            return statistics, None
        variance, mean = statistics
        if self.centered == 'frozen':  # mu_hat is a constant, and the statistic the mean square about it
            mu = self.running_mean.to(statistics.dtype)
            return variance + (mean - mu).square(), mu
        mean = torch.where(variance.isfinite(), mean, self.running_mean)
        self.running_mean.copy_(moving_average(self.running_mean, mean, self.alpha))
        return variance, mean

    def restart_warmup(self) -> None:
        """Restarts at step 1: resets steps, outliers and gradient statistics, and keeps the running statistics."""
        if self.activation_record is not None:
            self.activation_record.fill_(1)
        for buffer in (self.num_batches_tracked, self.gradient_record, self.psi, self.num_outliers):
            if buffer is not None:
                buffer.zero_()

    def start_run(self, resumed: bool, steps: int) -> str:
        """To be called when a run of `steps` more training steps begins; returns a warning for the user, or ''.

        A run that is not `resumed` from its own checkpoint begins at step 1: its weights may be of another task.
        """
        if not resumed and self.warmup_iters is not None:
            self.restart_warmup()
        total = steps + int(self.num_batches_tracked)
        if not isinstance(self.warmup_iters, int) or total > self.warmup_iters:
            return ''
        return (f'{type(self).__name__} never leaves its warm-up in this run: {total} training steps against '
                f'warmup_iters={self.warmup_iters}, so that none of its averages are used. Set a shorter one in '
                f'norm_cfg, for example warmup_iters={max(1, total // 10)}.')

    def set_progress(self, done: int, steps: int) -> None:
        """To be called before each training step with the steps done and those of the run; ends a share's warm-up."""
        if isinstance(self.warmup_iters, float):
            self.exact_steps = self._steps_of_records if done / steps >= self.warmup_iters else 1 << 62

    def extra_repr(self) -> str:
        arguments = ('eps', 'alpha', 'warmup_iters', 'window', 'outlier_filter', 'forward_average', 'backward_average',
                     'backward_momentum', 'centered', 'layer_scale', 'synchronized')
        shown = (f'{name}={getattr(self, name)!r}' for name in arguments if hasattr(self, name))
        return ', '.join([super().extra_repr(), *shown])


def _at_least_float32(values: Tensor) -> Tensor:
    return values.float() if values.is_floating_point() and torch.finfo(values.dtype).bits < 32 else values
