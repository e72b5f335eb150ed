"""Unified Normalization (arXiv 2208.01313), and the framework of its section 3.

:class:`OfflineNorm` reads like Algorithm 2 from top to bottom: `y = scale * x + shift` at inference, and the steps of
the training passes, numbered as in docs/paper_to_code.md. Tokens are `x` `(..., C)`; everything else is `(C,)`, one
number a channel. On a GPU :mod:`.kernels` computes the same in Triton.
"""
from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from ..registry import MODELS
from . import kernels
from .averages import (
    arithmetic_mean,
    bessel_correction,
    finite_or,
    geometric_mean,
    is_outlier,
    moving_average,
    power_norm_nu,
    push,
)
from .base import Norm, check_choice, check_count, check_eps
from .recompute import PendingSteps, Step
from .sync import Ranks, is_synchronized, merge_backward, merge_forward

# More steps than any run has.
_NEVER = 1 << 62


class OfflineNorm(Norm):
    """A norm with fixed statistics at inference: `y = gamma * (x - mu) / sqrt(var + eps) + beta` (Eq. 1).

    In training, `var_hat` and `psi` (Eq. 2-9) are averages over the last M steps; methods differ only in these.
    During warm-up, and until the records are full, each step uses its own statistics with the exact gradient. A channel
    whose statistic is not finite uses the running one instead. A step whose gradient is not finite anywhere leaves the
    gradient statistics unchanged. So inf and NaN never stay in the state.

    With activation checkpointing a recomputed forward pass is the SAME step, and a layer that runs several times
    identifies its last 64 steps by their statistics. Under torch.compile it is an error (:mod:`.recompute`).

    State: parameters `weight` (gamma), `bias` (beta) and, if requested, `eta` (1); buffers `running_var` and
    `num_batches_tracked` (training forward passes, as in torch's BatchNorm); with `centered` also `running_mean`; and
    `activation_record` (M, C), `gradient_record` (M, C), `psi` (C) and `num_outliers` (outlier steps), if the averages
    need them. Statistics are in float32, or in float64 after `.double()`: `.half()` and `.to(torch.bfloat16)` change
    the parameters alone, because a mean square of more than 65,504 is infinite in float16.

    Args:
        num_features (int): channels C of the `(..., C)` input.
        window (int | tuple[int, int]): M, how many steps are averaged; a pair is (forward, backward). Defaults to 4.
        alpha (float): weight of the OLD value in `running_var` and `psi` (Eq. 12), in [0, 1); 1 minus
            what BatchNorm calls momentum. Defaults to 0.9.
        warmup_iters (int | float, optional): training steps with exact statistics, or a share of the run, such as 0.1.
            An int counts the forward passes of this layer. None is for methods without a warm-up. Defaults to 4000,
            right for COCO and ImageNet; a short run needs fewer.
        outlier_filter (bool): whether a step whose statistics contain an outlier (Eq. 18-19) ignores all averages.
            Recommended for vision. Defaults to True.
        outlier_variance (str): 'layer' takes V in Eq. 19 as one number over all channels; 'channel', for study, as
            one for each, which fires on nearly every step. Defaults to 'layer'.
        forward_average (str): average over the activation statistics: 'gm' (geometric mean), 'am' (arithmetic mean),
            'ema' (with `alpha`) or 'current', which takes this step's alone. PN alone has 'earlier_ema', `running_var`
            before this step. The paper's Table 5 compares. Defaults to 'gm'.
        backward_average (str): average over the gradient statistics: 'am' or 'current'; PN alone has 'nu'.
            Defaults to 'am'.
        backward_momentum (bool): whether that average passes through a moving average with `alpha`.
            Defaults to True.
        centered (bool | str): whether to subtract the mean over tokens: the current step's, with its exact gradient.
            The variance about it is then averaged and filtered in place of the mean square. 'frozen' subtracts the
            `running_mean` of the checkpoint that the run starts from, and does not change it: right for a detector on
            a backbone that was pretrained with True. In eval mode both are the same. `--norm` of the tools chooses
            between them; a config names one. Not from the paper. Defaults to False.
        eta (float, optional): adds `eta * x` as RepBN does; the learnable number `eta` starts here. Not from the
            paper. Defaults to None, for no such term.
        eps (float): added to the variance. Defaults to 1e-5.

    Attributes:
        lacks_statistics (bool): whether the state that was loaded last had `weight` and no running statistics, so
            that it came from another kind of norm.
        ranks (Ranks, optional): the processes whose tokens count as one batch (:mod:`.sync`). The gradient statistics
            are those of the mean of the processes' losses, which DistributedDataParallel minimizes.
        loss_scale (Tensor, optional): `()`, the factor of the loss in the backward pass. The state does not depend
            on it.
    """

    forward_averages: Sequence[str] = ('gm', 'am', 'ema', 'current')
    backward_averages: Sequence[str] = ('am', 'current')
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
                 window: int | tuple[int, int] = 4,
                 alpha: float = 0.9,
                 warmup_iters: int | float | None = 4000,
                 outlier_filter: bool = True,
                 outlier_variance: str = 'layer',
                 forward_average: str = 'gm',
                 backward_average: str = 'am',
                 backward_momentum: bool = True,
                 centered: bool | str = False,
                 eta: float | None = None,
                 eps: float = 1e-5):
        super().__init__(num_features)
        if not (_is_number(alpha) and 0 <= alpha < 1):
            raise ValueError('alpha must be in [0, 1), the weight of the old value (0.9 keeps 90 % of it), '
                             f'got {alpha!r}')
        if eta is not None and not _is_number(eta):
            raise ValueError(f'eta must be its initial value, a number, or None to leave the term out, got {eta!r}')
        self.window = _check_window(window)
        self.alpha = alpha
        self.warmup_iters = _check_warmup(warmup_iters)
        self.outlier_filter = outlier_filter
        self.outlier_variance = check_choice('outlier_variance', outlier_variance, ('layer', 'channel'))
        self.forward_average = check_choice('forward_average', forward_average, self.forward_averages)
        self.backward_average = check_choice('backward_average', backward_average, self.backward_averages)
        self.backward_momentum = backward_momentum
        self.centered = check_choice('centered', centered, (False, True, 'frozen'))
        self.eps = check_eps(eps)

        keeps_activations = outlier_filter or forward_average in ('gm', 'am')
        keeps_gradients = backward_average == 'am'
        keeps_psi = backward_average != 'current' or backward_momentum
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_parameter('eta', None if eta is None else nn.Parameter(torch.tensor([float(eta)])))
        # A buffer that is None has no place in the state_dict.
        for name, value in dict(
                running_mean=torch.zeros(num_features) if centered else None,
                running_var=torch.ones(num_features),
                num_batches_tracked=torch.tensor(0, dtype=torch.long),
                activation_record=torch.ones(self.window[0], num_features) if keeps_activations else None,
                gradient_record=torch.zeros(self.window[1], num_features) if keeps_gradients else None,
                psi=torch.zeros(num_features) if keeps_psi else None,
                num_outliers=torch.tensor(0, dtype=torch.long) if outlier_filter else None).items():
            self.register_buffer(name, None if value is None else _precise(value))
        # The number of steps that are not averaged; None until the length of the run is known.
        self.unsettled = None if isinstance(warmup_iters, float) else self._settles_after(warmup_iters or 0)
        self.has_own_kernels = (forward_average, backward_average, backward_momentum,
                                outlier_variance) == ('gm', 'am', True, 'layer')
        self._pending = PendingSteps()

    def _normalize(self, x: Tensor, pad_mask: Tensor | None) -> Tensor:
        if not self.training or (x.numel() == 0 and not is_synchronized(self.ranks)):
            scale, shift = self._scale_and_shift(kernels.statistics_dtype(x.dtype))
            return kernels.affine(x, scale, shift)  # Eq. 1: scale * x + shift
        # The passes read it four times, and strided input is slower than one copy.
        x = x.contiguous()
        valid = None if pad_mask is None else ~pad_mask
        tokens = x.detach()  # statistics have no graph
        step = self._pending.step(lambda: self._new_step(tokens, valid), lambda: self._measure(tokens, valid))
        return self._apply_step(step, x, valid, self.bias)

    def _apply_step(self, step: Step, x: Tensor, valid: Tensor | None, bias: Tensor) -> Tensor:
        """Forward 4, with the estimated gradient."""
        y = _Normalize.apply(x, self.weight, bias, self.eta, self, step, valid)
        self._pending.watch(step, y)
        return y

    def _scale_and_shift(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        mean = None if self.running_mean is None else self.running_mean.to(dtype)
        eta = None if self.eta is None else self.eta.to(dtype)
        rstd = (self.running_var.to(dtype) + self.eps).rsqrt()
        return scale_and_shift(self.weight.to(dtype) * rstd, self.bias.to(dtype), mean, eta)

    def _measure(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Forward 1: the statistics over tokens, `s` `(1, C)`; with `centered` variance and mean `(2, C)`."""
        if self.centered:
            return torch.stack(kernels.variance_and_mean(x, valid))
        return kernels.second_moment(x, valid).unsqueeze(0)  # s_t = mean of x^2

    def _new_step(self, x: Tensor, valid: Tensor | None) -> Step:
        if self.unsettled is None:
            raise RuntimeError(
                f'{type(self).__name__}: warmup_iters={self.warmup_iters} is a share of a run whose length is unknown. '
                'OfflineNormHook sets the progress; without it, call set_progress(done, steps) of each norm before '
                'each step, or set a number of steps.')
        if not (self.centered or is_synchronized(self.ranks)) and (own := self._own_kernels(self.activation_record)):
            total = kernels.square_sum(x, valid)
            if total.dtype == self.running_var.dtype:
                return self._own_step(own, total, kernels.count_tokens(x, valid))
        measured = self._measure(x, valid)
        merged, tokens, share = merge_forward(self.ranks, measured, x, valid)
        return self._average_activation(merged, tokens, share=share, measured=measured)

    def _own_kernels(self, record: Tensor | None) -> ModuleType | None:
        """What computes UN's own averages on this device faster than plain torch."""
        return kernels.for_averages(record) if self.has_own_kernels else None

    def _own_step(self, own: ModuleType, total: Tensor, count: int | Tensor, **kept: Tensor | None) -> Step:
        """:meth:`_average_activation` of `total / count`, by its own kernels."""
        rstd, averaged, outlier, s = own.average_activation(
            total, count, self.num_batches_tracked, self.running_var, self.activation_record, self.num_outliers,
            self.unsettled, self.alpha, self.eps)
        return Step(rstd, averaged, outlier, **{'measured': s.view(1, -1), **kept})

    def _average_activation(self, statistics: Tensor, tokens: int | Tensor | None, **kept: Tensor | None) -> Step:
        """Forward 2, 3 and 5: updates the state with the statistics over so many tokens."""
        t, running, record, alpha = self.num_batches_tracked, self.running_var, self.activation_record, self.alpha
        mean = outlier = average = None
        if self.centered == 'frozen':  # mu_hat is a constant
            mean = self.running_mean.to(statistics.dtype)
            statistics = (statistics[0] + (statistics[1] - mean).square()).unsqueeze(0)  # the mean square about it
        elif self.centered:  # mu_hat is the mean of this step
            mean = torch.where(statistics[0].isfinite(), statistics[1], self.running_mean)
            self.running_mean.copy_(moving_average(self.running_mean, mean, alpha))  # 5. Eq. 12
        if statistics.dtype == running.dtype and (own := self._own_kernels(record)):
            return self._own_step(own, statistics[0], 1, mean=mean, **kept)
        t.add_(1)
        if self.blends_another:
            kept['t'] = t.clone()
        s = finite_or(statistics[0], running)
        averaged = t > self.unsettled  # 2. the warm-up is over, and M statistics were recorded before this one
        if record is not None:
            omega_prev = record.to(s.dtype)
            omega = push(omega_prev, s)
        if self.forward_average == 'gm':  # UN
            average = geometric_mean(omega)
        elif self.forward_average == 'am':
            average = arithmetic_mean(omega)
        elif self.forward_average == 'ema':  # MABN
            average = moving_average(running, s, alpha)
        elif self.forward_average == 'earlier_ema':  # PowerNorm
            average = running.to(s.dtype, copy=True)
        if self.outlier_filter:  # 3. Eq. 18-19
            gm = average if self.forward_average == 'gm' else None
            outlier = averaged & is_outlier(omega, omega_prev, self.outlier_variance == 'channel', gm)
            averaged = averaged & ~outlier
            self.num_outliers.add_(outlier)
        var_hat = s if average is None else torch.where(averaged, average, s)  # Eq. 3
        if record is not None:
            record.copy_(omega if outlier is None else push(omega_prev, torch.where(outlier, running, s)))
        newest = var_hat
        if self.forward_average in ('ema', 'earlier_ema'):  # the running statistic itself: not averaged twice
            newest = s
        elif self.keeps_unbiased:  # TokenBN, as torch's BatchNorm
            newest = finite_or(statistics[0] * bessel_correction(tokens), running)
        running.copy_(moving_average(running, newest, alpha))  # 5. Eq. 12
        rstd = (var_hat + self.eps).rsqrt()
        return Step(rstd, averaged, outlier, s if self.backward_average == 'nu' else None, mean, **kept)

    def _gradient_terms(self, step: Step, total: Tensor, total_mean: Tensor, count: int | Tensor, scale: Tensor,
                        rstd: Tensor, mean: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Backward 2 to 4 and 5 up to the tokens: updates the state; the `slope` and `constant` of Eq. 9.

        `total` and `total_mean` are the sums of `dy * (x - mean)` and `dy` over so many tokens.
        """
        self._pending.note_backward_pass(step)
        own = self._own_kernels(self.gradient_record) if total.dtype == self.running_var.dtype else None
        if own and step.share is None and mean is None:
            slope = own.average_gradient(total, count, scale, rstd, self.psi, self.gradient_record, step.outlier,
                                         step.averaged, self.alpha, self.loss_scale)
            return slope, None
        g, g_mean, factor = merge_backward(  # g_var and g_mu, the latter with the factor rstd
            self.ranks, step.share, scale * total / count, None if mean is None else scale * total_mean / count,
            self.loss_scale)
        if self.psi is None:
            slope = g * rstd.square()
        elif own:
            slope = own.average_gradient(g, 1, torch.ones_like(g), rstd, self.psi, self.gradient_record, step.outlier,
                                         step.averaged, self.alpha, factor)
        elif factor is None:
            slope = self._update_psi(step, g) * rstd.square()
        else:  # the state is in units of the unscaled loss
            slope = self._update_psi(step, g / factor) * factor * rstd.square()
        if mean is None:
            return slope, None
        return slope, mean * slope if self.centered == 'frozen' else mean * slope - g_mean

    def _update_psi(self, step: Step, g: Tensor) -> Tensor:
        """A gradient that overflows anywhere is useless, and a gradient scaler skips its step: it changes no state."""
        psi, record = self.psi, self.gradient_record
        averaged = torch.as_tensor(step.averaged)
        finite = g.isfinite()
        recorded = changes = finite.all()
        g = torch.where(finite, g, psi)
        target = g
        if step.outlier is not None:  # 4. records psi in place of g, and keeps psi
            outlier = torch.as_tensor(step.outlier)
            changes = recorded & ~outlier
            target = torch.where(outlier, psi, g)
        if self.backward_average == 'nu':  # PowerNorm
            used = psi.clone()
            newest = finite_or(power_norm_nu(psi, step.s * step.rstd.square(), g, self.alpha), used)
        else:
            if self.backward_average == 'am':  # 3. UN, MABN
                before = record.to(g.dtype)
                after = push(before, target)
                record.copy_(torch.where(recorded, after, before))
                target = torch.where(averaged, arithmetic_mean(after), g)
            newest = used = moving_average(psi, target, self.alpha) if self.backward_momentum else target
        psi.copy_(torch.where(changes, newest, psi))
        return torch.where(averaged, used, g)  # 2. in the warm-up and on an outlier step: the exact gradient

    def affine(self) -> tuple[Tensor, Tensor]:
        """`scale` and `shift` of the norm at inference, `y = scale * x + shift` (Eq. 1): two `(C,)` float64 tensors.

        Raises:
            RuntimeError: the norm has a `fold_obstacle`.
        """
        if self.fold_obstacle:
            raise RuntimeError(f'{type(self).__name__} is not an affine map: it {self.fold_obstacle}')
        scale, shift = self._scale_and_shift(torch.float64)
        return scale.detach(), shift.detach()

    @torch.no_grad()
    def set_affine(self, scale: Tensor, shift: Tensor, mean: Tensor, square: Tensor) -> None:
        """Makes the norm `y = scale * x + shift` at inference, and one that has seen no step; the inverse of `affine`.

        The running statistics and every row of the record of activations become those of tokens with `mean` E[x] and
        `square` E[x^2], and `eta` 0. All arguments are `(C,)`.
        """
        self.lacks_statistics = False
        self.restart_warmup()
        if self.centered:
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
        if self.centered:
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
            if _precise(after) is not after:
                setattr(self, name, before[name].to(after.device, torch.float32))  # not rounded
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for name, buffer in self.named_buffers(recurse=False):  # `assign=True` takes those of the checkpoint
            setattr(self, name, _precise(buffer))
        if prefix + 'weight' in state_dict:
            self.lacks_statistics = prefix + 'running_var' not in state_dict
        if not self.running_var.is_meta and not self.running_var.isfinite().all():
            warnings.warn(f'{prefix}running_var is not finite, as in a checkpoint that was saved in float16: '
                          'mmunorm.update_norms(model, batches) measures it again', stacklevel=2)

    def restart_warmup(self) -> None:
        """Restarts at step 1: resets steps, outliers and gradient statistics, and keeps the running statistics."""
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

    def _settles_after(self, warmup: int) -> int:
        """The step after which averaging begins: the warm-up is over, and the records are full."""
        records = [record for record in (self.activation_record, self.gradient_record) if record is not None]
        return max(warmup, *map(len, records), 0)

    def extra_repr(self) -> str:
        names = ('eps', 'alpha', 'window', 'warmup_iters', 'outlier_filter', 'forward_average', 'backward_average',
                 'backward_momentum', 'centered')
        shown = [super().extra_repr(), *(f'{name}={getattr(self, name)!r}' for name in names)]
        return ', '.join(shown if self.ranks is None else [*shown, 'synchronized'])


@MODELS.register_module()
class UN(OfflineNorm):
    """Unified Normalization over tokens: trains like LayerNorm, and is one multiply and add at inference.

    Training normalizes by the geometric mean of the last `window` mean squares, estimates the gradient by a moving
    average over the arithmetic mean of the last `window` gradient statistics, and ignores all averages on a step whose
    statistics contain an outlier (Eq. 18-19). Arguments and state are those of :class:`OfflineNorm`, with its defaults.
    """


@MODELS.register_module()
class SyncUN(UN):
    """:class:`UN` with statistics and an outlier decision over the tokens of all processes together.

    Processes may have different numbers of tokens, or none. Outside of a distributed run and in `eval()` it is UN.
    Every process has to run the same norms in the same order, forward and backward. Checkpoints
    are UN's. `convert_sync` and `revert_sync` do the same for a model of any offline norms.
    """
    ranks = Ranks()


class _Normalize(Function):
    """Forward 4 with its estimated gradient: `weight * (x - mean) / sqrt(var_hat + eps) + bias + eta * x`.

    `eta` is `(1,)`, or None for 0; `valid` None or bool `x.shape[:-1]`, False where a token is padding. The backward
    pass asks the norm once for the gradient statistics of the step.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, eta, norm, step, valid):
        scale = weight * step.rstd
        ctx.save_for_backward(x, scale, step.rstd, step.mean, eta, valid)
        ctx.norm, ctx.step = norm, step
        return kernels.affine(x, *scale_and_shift(scale, bias, step.mean, eta))  # 4. Eq. 4-5

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, scale, rstd, mean, eta, valid = ctx.saved_tensors
        dy = dy.contiguous()
        # 1. dgamma, dbeta, and the statistics g_var and g_mu of the gradient (Eq. 6-9)
        products, dbias, *over_valid = kernels.gradient_sums(dy, x, mean, valid)
        slope, constant = ctx.norm._gradient_terms(  # 2 to 4
            ctx.step, *over_valid, kernels.count_tokens(x, valid), scale, rstd, mean)
        dx = deta = None
        if ctx.needs_input_grad[0]:  # 5. Eq. 9
            dx = kernels.input_gradient(dy, x, scale if eta is None else scale + eta, slope, constant, valid)
        if eta is not None:
            deta = (products if mean is None else products + mean * dbias).sum().view(1)  # sum(dy * x)
        return dx, rstd * products, dbias, deta, None, None, None


def scale_and_shift(scale: Tensor, bias: Tensor, mean: Tensor | None, eta: Tensor | None) -> tuple[Tensor, Tensor]:
    """`scale * (x - mean) + bias + eta * x` as one scale and shift of x (Eq. 1), two `(C,)` tensors."""
    shift = bias if mean is None else torch.addcmul(bias, mean, scale, value=-1)
    return (scale if eta is None else scale + eta), shift


def _precise(values: Tensor) -> Tensor:
    """The values in at least float32."""
    return values.float() if values.is_floating_point() and torch.finfo(values.dtype).bits < 32 else values


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
