"""The framework of spec section 2: an offline norm is a choice of statistics and of averages over steps."""
from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from . import kernels
from .averages import bessel_correction, finite_or, moving_average
from .base import Norm, check_choice, check_count, check_eps
from .normalize import gradients, normalize, normalize_whole_step, scale_and_shift
from .steps import PendingSteps, Step, in_backward_pass
from .sync import Ranks, count_tokens

# A compiled backward pass may compute a value again from a buffer that the forward pass has changed since;
# the result of an operator of unknown content is stored instead. In compiled code this operator is also the
# only thing that sees a recomputed forward, before that changes anything.
# A call through torch.library.custom_op takes twice as long.
_OPERATORS = torch.library.Library('mmunorm', 'FRAGMENT')
_OPERATORS.define('keep_for_backward(Tensor values) -> Tensor', tags=(torch.Tag.pt2_compliant_tag, ))


@torch.library.impl(_OPERATORS, 'keep_for_backward', 'CompositeExplicitAutograd')
def _keep_for_backward(values: Tensor) -> Tensor:
    if in_backward_pass():
        raise RuntimeError('activation checkpointing computes a compiled offline norm a second time, which '
                           'would count its step twice: train without checkpointing (with_cp=False), or '
                           'without torch.compile')
    return values.clone()


@torch.library.register_fake('mmunorm::keep_for_backward', lib=_OPERATORS)
def _(values):
    return torch.empty_like(values)


class OfflineNorm(Norm):
    """A norm with fixed statistics at inference: `y = gamma * (x - mu) / sqrt(var + eps) + beta` (Eq. 1).

    In training, `var_hat` and `psi` (Eq. 2-9) are averages over steps; which ones is what tells the methods
    apart, and all of them are arguments here. For the first `warmup_iters` steps, and until the records are
    full, a step uses its own statistics with the exact gradient. A channel whose statistic is not
    finite takes the running one in its place, and a step whose gradient is not finite anywhere leaves the
    gradient statistics as they are, so that inf and NaN never stay in the state.

    Activation checkpointing is seen: a recomputed forward is the SAME step, nothing is recorded twice. A
    layer that runs several times before the backward pass knows its last 64 steps by their statistics; of
    those with the same, the newest is taken to come first. Of compiled code a recomputed forward is an error.

    `ranks`, which `convert_sync` sets, are the processes whose tokens count as one batch, however many each
    has; a step without any token takes the running statistics. The gradient statistics are those of
    the mean of the ranks' losses, which DistributedDataParallel minimizes. `loss_scale`, None or `()`, is
    what the loss is multiplied with before the backward pass; the state does not depend on it.

    State: parameters `weight` (gamma) and `bias` (beta), buffers `running_var` and `num_batches_tracked`
    (training steps seen); with `centered` also `running_mean`, and as the averages need them
    `activation_record` (M, C), `gradient_record` (M, C), `psi` (C) and `num_outliers` (outlier steps).

    Args:
        num_features (int): channels C of the `(..., C)` input.
        centered (bool): False takes the mean square for the variance, mu = 0; True mean and variance,
            which are always the current step's. Defaults to False.
        forward_average (str): `var_hat`, over the statistics of the last M steps: 'current' (this step's
            alone), 'gm' and 'am' (geometric and arithmetic mean), 'ema' (`running_var` with this step)
            or 'earlier_ema' (`running_var` before this step, as in PowerNorm). Defaults to 'current'.
        backward_average (str): `psi`, over the gradient statistics: 'current', 'am' or 'nu' (PowerNorm's).
            Defaults to 'current'.
        backward_momentum (bool): whether 'current' and 'am' pass through a moving average with `alpha`.
            Defaults to False.
        window (int | tuple[int, int]): M; a pair is (forward, backward). Defaults to 1.
        alpha (float): weight of the OLD value in moving averages (Eq. 12), in [0, 1); 1 minus what
            BatchNorm calls momentum. Defaults to 0.9.
        warmup_iters (int, optional): training steps with exact statistics. Defaults to None, for a method
            that has no warm-up.
        outlier_filter (bool): whether a step whose statistics hold an outlier (Eq. 18-19) drops every
            average. Defaults to False.
        outlier_variance (str): 'layer' takes V in Eq. 19 as one number over all channels; 'channel' as one
            for each channel, which fires on nearly every step and is there for study. Defaults to 'layer'.
        eps (float): added to the variance. Defaults to 1e-5.

    Raises:
        ValueError: an argument is out of its range, or `centered` meets an average over steps.
    """

    ranks: Ranks | None = None
    loss_scale: Tensor | None = None

    def __init__(self,
                 num_features: int,
                 centered: bool = False,
                 forward_average: str = 'current',
                 backward_average: str = 'current',
                 backward_momentum: bool = False,
                 window: int | tuple[int, int] = 1,
                 alpha: float = 0.9,
                 warmup_iters: int | None = None,
                 outlier_filter: bool = False,
                 outlier_variance: str = 'layer',
                 eps: float = 1e-5):
        super().__init__(num_features)
        self.eps = check_eps(eps)
        if not 0 <= alpha < 1:
            raise ValueError('alpha must be in [0, 1), the weight of the old value (0.9 keeps 90 % of it), '
                             f'got {alpha!r}')
        self.alpha = alpha
        self.window = _check_window(window)
        self.warmup_iters = None if warmup_iters is None else check_count('warmup_iters', warmup_iters, 0)
        self.forward_average = check_choice('forward_average', forward_average,
                                            ('current', 'gm', 'am', 'ema', 'earlier_ema'))
        self.backward_average = check_choice('backward_average', backward_average, ('current', 'am', 'nu'))
        self.backward_momentum = backward_momentum
        self.outlier_filter = outlier_filter
        self.outlier_variance = check_choice('outlier_variance', outlier_variance, ('layer', 'channel'))
        self.centered = centered
        if centered and (forward_average, backward_average, backward_momentum,
                         outlier_filter) != ('current', 'current', False, False):
            raise ValueError('centered=True normalizes by the current mean and variance, and takes neither '
                             'averages over steps nor the outlier filter')

        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_parameter('eta', None)  # RepBN's
        if centered:
            self.register_buffer('running_mean', torch.zeros(num_features))
        self.register_buffer('running_var', torch.ones(num_features))
        self.register_buffer('num_batches_tracked', torch.tensor(0, dtype=torch.long))
        self._keeps_activations = outlier_filter or forward_average in ('gm', 'am')
        keeps_gradients = backward_average == 'am'
        if self._keeps_activations:
            self.register_buffer('activation_record', torch.ones(self.window[0], num_features))
        if keeps_gradients:
            self.register_buffer('gradient_record', torch.zeros(self.window[1], num_features))
        self._keeps_psi = backward_average != 'current' or backward_momentum
        if self._keeps_psi:
            self.register_buffer('psi', torch.zeros(num_features))
        if outlier_filter:
            self.register_buffer('num_outliers', torch.tensor(0, dtype=torch.long))
        # A step before this one has too few statistics before it.
        self._unsettled_steps = max(warmup_iters or 0, self._keeps_activations and self.window[0],
                                    keeps_gradients and self.window[1])
        self._pending = PendingSteps()

    def __getstate__(self) -> dict:
        return {key: value for key, value in vars(self).items() if key != '_pending'}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._pending = PendingSteps()  # a copy takes no part in the passes under way

    def affine(self) -> tuple[Tensor, Tensor]:
        """The norm at inference as `y = scale * x + shift` (spec section 4): two `(C,)` float64 tensors.

        Raises:
            RuntimeError: the norm has a `fold_obstacle`.
        """
        if self.fold_obstacle:
            raise RuntimeError(f'{type(self).__name__} is no affine map: it {self.fold_obstacle}')
        scale, shift = self._affine(torch.float64)
        return scale.detach(), shift.detach()

    def _affine(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        mean = self.running_mean.to(dtype) if self.centered else None
        eta = None if self.eta is None else self.eta.to(dtype)
        rstd = (self.running_var.to(dtype) + self.eps).rsqrt()
        return scale_and_shift(self.weight.to(dtype), self.bias.to(dtype), rstd, mean, eta)

    @property
    def newest_step(self) -> Step | None:
        """The newest training step, `y = weight * (x - mean) / sqrt(var_hat + eps) + bias + eta * x`.

        Its `measured` are the statistics of this process's `x`, without padding. None before the first step,
        in a copy, and for a method that changes `x` or `y` besides. A forward pass that is compiled,
        recomputed, of no token or in `eval()` leaves no step; the one before then remains.
        """
        return self._pending.newest

    def restart_warmup(self) -> None:
        """Begins again at step 1, for a new task: forgets steps, outliers and gradient statistics.

        `weight`, `bias` and the running statistics stay.
        """
        self.num_batches_tracked.zero_()
        if self._keeps_activations:
            self.activation_record.fill_(1)
        for name in ('gradient_record', 'psi', 'num_outliers'):
            if hasattr(self, name):
                getattr(self, name).zero_()

    def _normalize(self, x: Tensor, pad_mask: Tensor | None) -> Tensor:
        if not self.training or (x.numel() == 0 and not self._is_synchronized()):
            return kernels.normalize_forward(x, *self._affine(kernels.statistics_dtype(x.dtype)))
        # The kernels read it four times, and those for strided input are slower than one copy.
        x = x.contiguous()
        if (y := self._normalize_whole_step(x, pad_mask)) is not None:
            return y
        valid = None if pad_mask is None else ~pad_mask
        with torch.no_grad():
            step = self._step(x, valid)
        return self._apply_step(step, x, valid, self.bias)

    def _normalize_whole_step(self, x: Tensor, pad_mask: Tensor | None) -> Tensor | None:
        """A new step by one call forward and one backward; None where it has more to it, or other input."""
        if (pad_mask is not None or self.centered or self.eta is not None or torch.compiler.is_compiling()
                or self._is_synchronized() or (self._pending and in_backward_pass())):
            return None
        weight, bias = self.weight, self.bias  # each a search in a module's dictionaries
        state = (self.running_var, getattr(self, 'activation_record', None),
                 getattr(self, 'num_outliers', None), self.num_batches_tracked)
        if not kernels.takes_whole_steps(x, weight, bias, *state):
            return None
        return normalize_whole_step(x, weight, bias, partial(self._step_forward, state), self._step_backward)

    def _step_forward(self, state: tuple[Tensor | None, ...], x: Tensor, weight: Tensor,
                      bias: Tensor) -> tuple[Tensor, Tensor, Step]:
        y, rstd, measured, s, var_hat, outlier, averaged = kernels.step_forward(
            x, weight, bias, *state, **self._forward_config(), eps=self.eps,
            needs_s=self.backward_average == 'nu')
        step = Step(var_hat, s, outlier, averaged, measured=measured)
        self._pending.append(step)
        return y, rstd, step

    def _step_backward(self, step: Step, dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor,
                       needs_dx: bool) -> tuple[Tensor | None, Tensor, Tensor]:
        if self._keeps_psi and self.loss_scale is None:
            grads = kernels.step_backward(
                dy, x, weight, rstd, self.psi, getattr(self, 'gradient_record', None), step.outlier,
                step.averaged, step.s, step.var_hat, needs_dx, **self._backward_config())
            if grads is not None:  # None where something that it cannot read has come since the forward pass
                self._pending.note_backward_pass()
                return grads
        return gradients(dy, x, weight, rstd, mean=None, eta=None, valid=None,
                         average_gradient=partial(self._average_gradient, step), needs_dx=needs_dx)

    def _is_synchronized(self) -> bool:
        return self.ranks is not None and self.ranks.size > 1

    def _apply_step(self, step: Step, x: Tensor, valid: Tensor | None, bias: Tensor) -> Tensor:
        return normalize(x, self.weight, bias, step.var_hat, step.mean, self.eta, valid, self.eps,
                         partial(self._average_gradient, step))

    def _step(self, x: Tensor, valid: Tensor | None) -> Step:
        if torch.compiler.is_compiling():
            return self._new_step(x, valid)._replace(measured=None).map_at_once(
                torch.ops.mmunorm.keep_for_backward)
        if self._pending and in_backward_pass():
            return self._pending.recall(partial(self._measure, x, valid))
        step = self._new_step(x, valid)
        self._pending.append(step)
        return step

    def _measure(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """This step's statistics: the mean square `(1, C)`, or variance and mean `(2, C)`."""
        if self.centered:
            return torch.stack(kernels.variance_and_mean(x, valid))
        return kernels.second_moment(x, valid).unsqueeze(0)

    def _new_step(self, x: Tensor, valid: Tensor | None) -> Step:
        """Forward steps 1-3 and 5 of spec section 3, with any of the averages; updates the state."""
        measured = merged = self._measure(x, valid)
        share = None
        if self.centered or self._is_synchronized():  # with a mask it is one more pass over that
            tokens = count_tokens(x, valid)
        if self._is_synchronized():
            own = tokens if isinstance(tokens, Tensor) else measured.new_full((), tokens)
            merged, tokens = self.ranks.merge(measured, own)
            share = own / tokens
        self.num_batches_tracked.add_(1)
        if not self.centered:
            return self._advance(merged[0])._replace(share=share, measured=measured)

        s = finite_or(merged[0], self.running_var)
        mean = torch.where(merged[0].isfinite(), merged[1], self.running_mean)
        self.running_mean.copy_(moving_average(self.running_mean, mean, self.alpha))
        # As in torch's BatchNorm, the biased variance normalizes and the unbiased one is kept.
        newest = finite_or(merged[0] * bessel_correction(tokens), self.running_var)
        self.running_var.copy_(moving_average(self.running_var, newest, self.alpha))
        return Step(s, share=share, mean=mean, t=self.num_batches_tracked.clone(), measured=measured)

    def _advance(self, measured: Tensor) -> Step:
        """Updates the state with the step's mean square `(C,)`."""
        s, var_hat, outlier, averaged = kernels.advance(
            measured, self.num_batches_tracked, self.running_var, getattr(self, 'activation_record', None),
            getattr(self, 'num_outliers', None), **self._forward_config())
        return Step(var_hat, s if self.backward_average == 'nu' else None, outlier, averaged)

    def _forward_config(self) -> dict:
        return dict(average=self.forward_average, per_channel=self.outlier_variance == 'channel',
                    unsettled=self._unsettled_steps, alpha=self.alpha)

    def _backward_config(self) -> dict:
        return dict(average=self.backward_average, momentum=self.backward_momentum, alpha=self.alpha,
                    eps=self.eps)

    def _average_gradient(self, step: Step, g: Tensor,
                          g_mean: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Records this step's gradient statistics; the `psi` and `g_mean` to use (backward steps 2-4)."""
        if not torch.compiler.is_compiling():
            self._pending.note_backward_pass()
        scale = self.loss_scale
        if step.share is not None:
            if g_mean is None:
                g = self.ranks.mean(g, step.share)
            else:
                g, g_mean = self.ranks.mean(torch.stack([g, g_mean]), step.share)
            # A rank's loss is as many times its part of the mean of the ranks' losses.
            scale = self.ranks.size if scale is None else scale * self.ranks.size
        if not self._keeps_psi:
            return g, g_mean
        psi = kernels.average_gradient(
            g if scale is None else g / scale, self.psi, getattr(self, 'gradient_record', None), step.outlier,
            step.averaged, step.s, step.var_hat, **self._backward_config())
        return (psi if scale is None else psi * scale), g_mean

    def extra_repr(self) -> str:
        synchronized = '' if self.ranks is None else ', synchronized'
        return f'{super().extra_repr()}, eps={self.eps}, alpha={self.alpha}{synchronized}'


def _check_window(window) -> tuple[int, int]:
    pair = (window, window) if isinstance(window, int) else window
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f'window must be an int or a pair (forward, backward) of ints, got {window!r}')
    return tuple(check_count('window', size, least=1) for size in pair)
