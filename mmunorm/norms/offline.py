"""The framework of the paper's section 3: an offline norm is a choice of statistics and of averages over steps."""
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ..compat import is_compiling
from . import algorithm, compiled, kernels
from .algorithm import Step
from .base import Norm, check_choice, check_count, check_eps
from .recompute import PendingSteps
from .sync import Ranks, is_synchronized, merge_backward, merge_forward

# A number of steps that no run has.
_NEVER = 1 << 62


class OfflineNorm(Norm):
    """A norm with fixed statistics at inference: `y = gamma * (x - mu) / sqrt(var + eps) + beta` (Eq. 1).

    In training, `var_hat` and `psi` (Eq. 2-9) are averages over steps, in which alone the methods differ;
    :mod:`.algorithm` computes a step. For the first `warmup_iters` steps, and until the records are full, a step uses
    its own statistics with the exact gradient. A channel whose statistic is not finite takes the running one in its
    place. A step whose gradient is not finite anywhere leaves the gradient statistics as they are. So inf and NaN never
    stay in the state.

    In activation checkpointing (:mod:`.recompute`) a recomputed forward is the SAME step, and a layer that runs several
    times knows its last 64 steps by their statistics. Under torch.compile (:mod:`.compiled`) it is an error.

    State: parameters `weight` (gamma), `bias` (beta) and, where it is asked for, `eta` (1); buffers `running_var`
    and `num_batches_tracked` (forward passes in training, as in torch's BatchNorm); with `centered` also
    `running_mean`, and as the averages need them `activation_record` (M, C), `gradient_record` (M, C), `psi` (C) and
    `num_outliers` (outlier steps).

    Args:
        num_features (int): channels C.
        centered (bool | str): False takes the mean square for the variance, mu = 0. True takes the variance, and the
            mean of the current step with its exact gradient; only the variance is averaged over steps. 'frozen' takes
            `running_mean` as it is for a constant mu, and the mean square about it. Defaults to False.
        forward_average (str): `var_hat`, over the statistics of the last M steps: 'current' (this step's
            alone), 'gm' and 'am' (geometric and arithmetic mean), 'ema' (`running_var` with this step)
            or 'earlier_ema' (`running_var` before this step, as in PowerNorm). Defaults to 'current'.
        backward_average (str): `psi`, over the gradient statistics: 'current', 'am' or 'nu' (PowerNorm's).
            Defaults to 'current'.
        backward_momentum (bool): whether 'current' and 'am' pass through a moving average with `alpha`.
            Defaults to False.
        window (int | tuple[int, int]): M; a pair is (forward, backward). Defaults to 1.
        warmup_iters (int | float, optional): as UN's; None for a method that has no warm-up. Defaults to None.
        outlier_filter (bool): whether a step whose statistics hold an outlier (Eq. 18-19) drops every
            average. Defaults to False.
        alpha, outlier_variance, eta, eps: as UN's, and with the same defaults.

    Attributes:
        lacks_statistics (bool): whether the state that was loaded last had `weight` and no running statistics, so
            that it came from another kind of norm.
        ranks (Ranks, optional): the processes whose tokens count as one batch (:mod:`.sync`). The gradient statistics
            are those of the mean of the processes' losses, which DistributedDataParallel minimizes.
        loss_scale (Tensor, optional): `()`, what the loss is multiplied with before the backward pass. The state
            does not depend on it.

    Raises:
        ValueError: an argument is out of its range.
    """

    lacks_statistics = False
    running_var: Tensor
    num_batches_tracked: Tensor
    ranks: Ranks | None = None
    loss_scale: Tensor | None = None
    # Whether the running variance is the unbiased one.
    keeps_unbiased = False
    # Whether another norm is blended in, so that `weight.grad` covers a part of the output.
    blends_another = False

    def __init__(self,
                 num_features: int,
                 centered: bool | str = False,
                 forward_average: str = 'current',
                 backward_average: str = 'current',
                 backward_momentum: bool = False,
                 window: int | tuple[int, int] = 1,
                 alpha: float = 0.9,
                 warmup_iters: int | float | None = None,
                 outlier_filter: bool = False,
                 outlier_variance: str = 'layer',
                 eta: float | None = None,
                 eps: float = 1e-5):
        super().__init__(num_features)
        self.eps = check_eps(eps)
        if not (_is_number(alpha) and 0 <= alpha < 1):
            raise ValueError('alpha must be in [0, 1), the weight of the old value (0.9 keeps 90 % of it), '
                             f'got {alpha!r}')
        self.alpha = alpha
        self.window = _check_window(window)
        self.warmup_iters = _check_warmup(warmup_iters)
        self.forward_average = forward_average
        self.backward_average = backward_average
        self.backward_momentum = backward_momentum
        self.outlier_filter = outlier_filter
        self.outlier_variance = check_choice('outlier_variance', outlier_variance, ('layer', 'channel'))
        self.centered = check_choice('centered', centered, (False, True, 'frozen'))
        if eta is not None and not _is_number(eta):
            raise ValueError(f'eta must be the number that it starts from, or None for no such term, got {eta!r}')
        self._make_state(eta)
        self.unsettled = None if isinstance(warmup_iters, float) else self._settles_after(warmup_iters or 0)
        self.has_own_kernels = (forward_average, backward_average, backward_momentum,
                                outlier_variance) == ('gm', 'am', True, 'layer')
        self._pending = PendingSteps()

    def _make_state(self, eta: float | None) -> None:
        channels = self.num_features
        keeps_activations = self.outlier_filter or self.forward_average in ('gm', 'am')
        keeps_gradients = self.backward_average == 'am'
        keeps_psi = self.backward_average != 'current' or self.backward_momentum
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_parameter('eta', None if eta is None else nn.Parameter(torch.tensor([float(eta)])))
        # A buffer that is None has no place in the state_dict.
        for name, value in dict(
                running_mean=torch.zeros(channels) if self.centered else None,
                running_var=torch.ones(channels),
                num_batches_tracked=torch.tensor(0, dtype=torch.long),
                activation_record=torch.ones(self.window[0], channels) if keeps_activations else None,
                gradient_record=torch.zeros(self.window[1], channels) if keeps_gradients else None,
                psi=torch.zeros(channels) if keeps_psi else None,
                num_outliers=torch.tensor(0, dtype=torch.long) if self.outlier_filter else None).items():
            self.register_buffer(name, value)

    def _settles_after(self, warmup: int) -> int:
        """The step after which averaging begins: the warm-up is over, and the records are full."""
        records = [record for record in (self.activation_record, self.gradient_record) if record is not None]
        return max(warmup, *map(len, records), 0)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if prefix + 'weight' in state_dict:
            self.lacks_statistics = prefix + 'running_var' not in state_dict

    @property
    def is_fresh(self) -> bool:
        """Whether the running statistics are still those that the norm was built with."""
        return not self.num_batches_tracked and bool((self.running_var == 1).all())

    def affine(self) -> tuple[Tensor, Tensor]:
        """`scale` and `shift` of the norm at inference, `y = scale * x + shift` (Eq. 1): two `(C,)` float64 tensors.

        Raises:
            RuntimeError: the norm has a `fold_obstacle`.
        """
        if self.fold_obstacle:
            raise RuntimeError(f'{type(self).__name__} is no affine map: it {self.fold_obstacle}')
        scale, shift = self._affine(torch.float64)
        return scale.detach(), shift.detach()

    @torch.no_grad()
    def set_affine(self, scale: Tensor, shift: Tensor, mean: Tensor, square: Tensor) -> None:
        """Makes the norm `y = scale * x + shift` at inference, and one that has seen no step; the inverse of `affine`.

        The running statistics and every row of the record of activations become those of tokens with `mean` E[x] and
        `square` E[x^2], and `eta` 0. All arguments are `(C,)`.
        """
        variance = (square - mean.square()).clamp(min=0) if self.centered else square
        self.lacks_statistics = False
        self.restart_warmup()
        self.running_var.copy_(variance)
        if self.activation_record is not None:
            self.activation_record.copy_(variance.expand_as(self.activation_record))
        if self.eta is not None:
            self.eta.zero_()
        # From the statistics as they are stored, which may be less precise.
        self.weight.copy_(scale * (self.running_var.to(scale.dtype) + self.eps).sqrt())
        if self.centered:
            self.running_mean.copy_(mean)
            shift = shift + scale * self.running_mean.to(scale.dtype)
        self.bias.copy_(shift)

    def _affine(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        mean = None if self.running_mean is None else self.running_mean.to(dtype)
        eta = None if self.eta is None else self.eta.to(dtype)
        rstd = (self.running_var.to(dtype) + self.eps).rsqrt()
        return algorithm.scale_and_shift(self.weight.to(dtype), self.bias.to(dtype), rstd, mean, eta)

    def restart_warmup(self) -> None:
        """Begins again at step 1: forgets steps, outliers and gradient statistics, and keeps the running ones."""
        if self.activation_record is not None:
            self.activation_record.fill_(1)
        for buffer in (self.num_batches_tracked, self.gradient_record, self.psi, self.num_outliers):
            if buffer is not None:
                buffer.zero_()

    def start_run(self, resumed: bool, steps: int) -> str:
        """As :meth:`Norm.start_run`. A run that is not resumed begins at step 1: its weights may be of another task."""
        if self.warmup_iters is None:
            return ''
        if not resumed:
            self.restart_warmup()
        total = steps + int(self.num_batches_tracked)
        if isinstance(self.warmup_iters, float) or total > self.warmup_iters:
            return ''
        return (f'{type(self).__name__} never leaves its warm-up in this run: {total} training steps against '
                f'warmup_iters={self.warmup_iters}, so that none of its averages are used. Set a shorter one in '
                f'norm_cfg, for example warmup_iters={max(1, total // 10)}.')

    def set_progress(self, done: int, steps: int) -> None:
        """As :meth:`Norm.set_progress`: ends a warm-up that is a share of the run."""
        if isinstance(self.warmup_iters, float):
            self.unsettled = self._settles_after(0 if done / steps >= self.warmup_iters else _NEVER)

    def _normalize(self, x: Tensor, pad_mask: Tensor | None) -> Tensor:
        if not self.training or (x.numel() == 0 and not is_synchronized(self.ranks)):
            return kernels.affine(x, *self._affine(kernels.statistics_dtype(x.dtype)))
        # The passes read it four times, and strided input is slower than one copy.
        x = x.contiguous()
        valid = None if pad_mask is None else ~pad_mask
        new = partial(self._new_step, x, valid)
        with torch.no_grad():
            if is_compiling():
                step = compiled.keep(new())
            else:
                step = self._pending.step(new, partial(algorithm.measure, x, valid, self.centered))
        return self._apply_step(step, x, valid, self.bias)

    def _new_step(self, x: Tensor, valid: Tensor | None) -> Step:
        if self.unsettled is None:
            raise RuntimeError(
                f'{type(self).__name__}: warmup_iters={self.warmup_iters} is a share of a run that is not known. '
                'OfflineNormHook tells how much is done; where there is none, call set_progress(done, steps) of each '
                'norm before each step, or give a number of steps.')
        measured = algorithm.measure(x, valid, self.centered)
        merged, tokens, share = merge_forward(self.ranks, measured, x, valid)
        self.num_batches_tracked.add_(1)
        step = algorithm.average_activation(self, merged, tokens)
        return Step(*step[:5], share=share, measured=measured)

    def _apply_step(self, step: Step, x: Tensor, valid: Tensor | None, bias: Tensor) -> Tensor:
        average_gradient = partial(self._average_gradient, step)
        if not is_compiling():
            self._pending.watch(step, average_gradient)
        return algorithm.normalize(x, self.weight, bias, step, self.eta, valid, self.eps, average_gradient)

    def _average_gradient(self, step: Step, g: Tensor,
                          g_mean: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The `psi` and `g_mean` that are used in `dx`; the state is kept in units of the plain loss."""
        if not is_compiling():
            self._pending.note_backward_pass(step)
        g, g_mean, scale = merge_backward(self.ranks, step.share, g, g_mean, self.loss_scale)
        if self.centered == 'frozen':
            g_mean = torch.zeros_like(g_mean)
        if self.psi is None:
            return g, g_mean
        if scale is None:
            return algorithm.average_gradient(self, step, g), g_mean
        return algorithm.average_gradient(self, step, g / scale) * scale, g_mean

    def extra_repr(self) -> str:
        names = ('eps', 'alpha', 'window', 'warmup_iters', 'outlier_filter', 'forward_average', 'backward_average',
                 'backward_momentum', 'centered')
        shown = [super().extra_repr(), *(f'{name}={getattr(self, name)!r}' for name in names)]
        return ', '.join(shown if self.ranks is None else [*shown, 'synchronized'])


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_warmup(warmup_iters: int | float | None) -> int | float | None:
    if warmup_iters is None or _is_number(warmup_iters) and (
            0 < warmup_iters < 1 if isinstance(warmup_iters, float) else warmup_iters >= 0):
        return warmup_iters
    raise ValueError('warmup_iters must be a number of steps, an int of at least 0, or a share of the run, a float '
                     f'between 0 and 1, got {warmup_iters!r}')


def _check_window(window: int | Sequence[int]) -> tuple[int, int]:
    pair = (window, window) if isinstance(window, int) else window
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f'window must be an int or a pair (forward, backward) of ints, got {window!r}')
    forward, backward = (check_count('window', size, least=1) for size in pair)
    return forward, backward
