"""Unified Normalization (arXiv 2208.01313): Algorithm 2 from top to bottom, in the framework of its section 3.

:class:`OfflineNorm` is the framework, :class:`UN` chooses its averages. Steps are numbered as in docs/paper_to_code.md.
Tokens are `x` `(..., C)`; everything else is `(C,)`, one number a channel. The buffers are those of :mod:`.state`.
"""
from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from ..registry import MODELS
from . import kernels
from .averages import arithmetic_mean, finite_or, geometric_mean, is_outlier, moving_average, not_finite, push
from .base import check_choice, check_count
from .kernels import reference
from .state import OfflineState
from .step import Step
from .sync import merge_backward, merge_forward, num_processes


class OfflineNorm(OfflineState):
    """A norm with fixed statistics at inference: `y = gamma * (x - mu) / sqrt(var + eps) + beta` (Eq. 1).

    In training, `var_hat` and `psi` (Eq. 2-9) are averages over the last steps, which a subclass chooses by
    :meth:`average` and :meth:`average_gradient`. During warm-up, and until the records are full, each step uses its own
    statistics with the exact gradient. A channel whose statistic is not finite uses the running one instead. A step
    whose gradient is not finite anywhere leaves the gradient statistics unchanged. So inf and NaN never stay in the
    state. With activation checkpointing a recomputed forward pass is the SAME step (:mod:`.recompute`).

    Attributes:
        synchronized (bool): whether the tokens of all processes count as one batch (:mod:`.sync`). The gradient
            statistics are those of the mean of the processes' losses, which DistributedDataParallel minimizes.
        loss_scale (Tensor, optional): `()`, the factor of the loss in the backward pass. The state does not depend
            on it.
    """

    synchronized = False
    loss_scale: Tensor | None = None
    has_triton_kernels = False  # for its training steps on a GPU

    @property
    def is_distributed(self) -> bool:
        """Whether statistics are merged over several processes."""
        return self.synchronized and num_processes() > 1

    def average(self, s: Tensor, averaged: Tensor, tokens: int | Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Forward 2, 3 and 5: `var_hat` (Eq. 3), whether it is an average, and whether the step is an outlier.

        `s` are the statistics over so many tokens, all finite; `averaged` `()` is True after the warm-up. The method
        updates `running_var` and the record of activations.
        """
        raise NotImplementedError

    def average_gradient(self, g: Tensor, step: Step) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Backward 2 to 4: the `psi` that the step uses (Eq. 9), and the next `psi` and `gradient_record` to store.

        Without a buffer `psi`, every step has its exact gradient.
        """
        return g, None, None

    def _normalize_tokens(self, x: Tensor, valid: Tensor | None) -> Tensor:
        x = self.statistics_input(x)
        if not self.training or (x.numel() == 0 and not self.is_distributed):
            return reference.affine(x, *self.scale_and_shift(reference.statistics_dtype(x.dtype)))  # Eq. 1
        # The passes read it four times, and strided input is slower than one copy.
        x = x.contiguous()
        tokens = x.detach()  # statistics have no graph
        step = self._pending.step(lambda: self._new_step(tokens, valid), lambda: self._measure(tokens, valid))
        return self._apply_step(step, x, valid, self.bias)

    def scale_and_shift(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`scale` and `shift` of `y = scale * x + shift` at inference (Eq. 1), `(C,)`, differentiable."""
        mean = None if self.running_mean is None else self.running_mean.to(dtype)
        eta = None if self.eta is None else self.eta.to(dtype)
        rstd = (self.running_var.to(dtype) + self.eps).rsqrt()
        return _scale_and_shift(self.weight.to(dtype) * rstd, self.bias.to(dtype), mean, eta)

    def _new_step(self, x: Tensor, valid: Tensor | None) -> Step:
        """Forward 1 to 3 and 5."""
        if self.exact_steps is None:
            raise RuntimeError(
                f'{type(self).__name__}: warmup_iters={self.warmup_iters} is a share of a run whose length is unknown. '
                'OfflineNormHook sets the progress; without it, call set_progress(done, steps) of each norm before '
                'each step, or set a number of steps.')
        if triton := kernels.triton_for(self, x, valid):
            return triton.new_step(self, x)
        measured = self._measure(x, valid)
        statistics, tokens, share = merge_forward(measured, x, valid, self.is_distributed)
        statistic, mean = self._center(statistics)
        t = self.num_batches_tracked.add_(1)
        s = finite_or(statistic, self.running_var)
        var_hat, averaged, outlier = self.average(s, t > self.exact_steps, tokens)
        rstd = (var_hat + self.eps).rsqrt()
        return Step(rstd, averaged, outlier, s, mean, share, measured=measured)

    def _measure(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Forward 1: the statistics over tokens, `s` `(C,)`; with `centered` variance and mean `(2, C)`."""
        if self.centered:
            return torch.stack(reference.variance_and_mean(x, valid))
        return reference.second_moment(x, valid)  # s = mean of x^2

    def _apply_step(self, step: Step, x: Tensor, valid: Tensor | None, bias: Tensor) -> Tensor:
        """Forward 4, with the estimated gradient."""
        y = _Normalize.apply(x, self.weight, bias, self.eta, self, step, valid)
        self._pending.watch(step, y)
        return y

    def _update_running_var(self, newest: Tensor) -> None:
        """Forward 5, Eq. 12."""
        self.running_var.copy_(moving_average(self.running_var, newest, self.alpha))

    def _backward_statistics(self, step: Step, dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor,
                             mean: Tensor | None, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Backward 1 to 4: dgamma, dbeta, the `psi` to use (Eq. 9) and `g_mu`."""
        self._pending.note_backward_pass(step)
        if triton := kernels.triton_for(self, x, valid):
            return *triton.backward_statistics(self, step, dy, x, weight), None
        # dgamma and dbeta over all tokens, and the means of dy * z and of dy over the valid ones
        dweight, dbias, mean_dy_z, mean_dy = reference.gradient_sums(dy, x, rstd, mean, valid)
        # 1. g_var and g_mu (Eq. 6-9); a constant mean has no gradient
        g_mean = None if mean is None or self.centered == 'frozen' else weight * mean_dy
        g, g_mean, scale = merge_backward(step.share, weight * mean_dy_z, g_mean, self.loss_scale)
        if self.psi is None:
            return dweight, dbias, g, g_mean
        g = g if scale is None else g / scale  # the state is in units of the unscaled loss
        overflows = not_finite(g)
        used, psi, record = self.average_gradient(torch.where(overflows, self.psi, g), step)
        # A gradient that overflows anywhere is useless, and a gradient scaler skips its step: it changes no state.
        useless = overflows.any()
        self.psi.copy_(torch.where(useless, self.psi, psi))
        if record is not None:
            self.gradient_record.copy_(torch.where(useless, self.gradient_record, record))
        return dweight, dbias, used if scale is None else used * scale, g_mean


@MODELS.register_module()
class UN(OfflineNorm):
    """Unified Normalization over tokens: trains like LayerNorm, and is one multiply and add at inference.

    Training normalizes by the geometric mean of the last `window` mean squares, estimates the gradient by a moving
    average over the arithmetic mean of the last `window` gradient statistics, and ignores all averages on a step whose
    statistics contain an outlier (Eq. 18-19). :class:`.OfflineState` lists the state.

    Args:
        num_features (int): channels C of the `(..., C)` input.
        window (int): M, how many steps are averaged. Defaults to 4.
        alpha (float): weight of the OLD value in `running_var` and `psi` (Eq. 12), in [0, 1); 1 minus
            what BatchNorm calls momentum. Defaults to 0.9.
        warmup_iters (int | float): training steps with exact statistics, or a share of the run, such as 0.1. An int
            counts the forward passes of this layer. Defaults to 4000, right for COCO and ImageNet; a short run needs
            fewer.
        outlier_filter (bool): whether a step whose statistics contain an outlier (Eq. 18-19) ignores all averages.
            Recommended for vision. Defaults to True.
        forward_average (str): average over the activation statistics: 'gm' (geometric mean), or 'current' for this
            step's alone. The paper's Table 5 compares. Defaults to 'gm'.
        backward_average (str): average over the gradient statistics: 'am' (arithmetic mean) or 'current'.
            Defaults to 'am'.
        backward_momentum (bool): whether that average passes through a moving average with `alpha`.
            Defaults to True.
        centered (bool | str): whether to subtract the mean over tokens: the current step's, with its exact gradient.
            The variance about it then replaces the mean square. 'frozen' subtracts the `running_mean` of the checkpoint
            that the run starts from, and does not change it: for a detector whose backbone was pretrained with True.
            In eval mode both are the same. Not from the paper. Defaults to False.
        eta (float, optional): adds `eta * x` as RepBN does; the learnable number `eta` starts here. Not from the
            paper. Defaults to None, for no such term.
        eps (float): added to the variance. Defaults to 1e-5.
    """

    def __init__(self, num_features: int, window: int = 4, alpha: float = 0.9,
                 warmup_iters: int | float = 4000, outlier_filter: bool = True, forward_average: str = 'gm',
                 backward_average: str = 'am', backward_momentum: bool = True, centered: bool | str = False,
                 eta: float | None = None, eps: float = 1e-5):
        check_count('window', window, minimum=1)
        super().__init__(
            num_features, alpha, warmup_iters, eps, centered, eta,
            activations=window if outlier_filter or forward_average == 'gm' else 0,
            gradients=window if backward_average == 'am' else 0,
            has_psi=backward_average == 'am' or backward_momentum, counts_outliers=outlier_filter)
        self.window = window
        self.outlier_filter = outlier_filter
        self.forward_average = check_choice('forward_average', forward_average, ('gm', 'current'))
        self.backward_average = check_choice('backward_average', backward_average, ('am', 'current'))
        self.backward_momentum = backward_momentum
        # Triton unrolls its loops over the window.
        self.has_triton_kernels = window <= 32 and (
            forward_average, backward_average, backward_momentum, centered) == ('gm', 'am', True, False)

    def average(self, s: Tensor, averaged: Tensor, tokens: int | Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Forward 2, 3 and 5, Eq. 16 and 18-19."""
        var_hat, outlier = s, None
        if self.activation_record is not None:
            omega = push(self.activation_record, s)
            gm = geometric_mean(omega)
            if self.outlier_filter:  # 3. An outlier step drops the averages, and records running_var in place of s
                outlier = averaged & is_outlier(omega, self.activation_record, gm)
                averaged = averaged != outlier  # averaged and no outlier, which implies averaged
                self.num_outliers.add_(outlier)
                omega[-1] = torch.where(outlier, self.running_var, s)
            self.activation_record.copy_(omega)
            if self.forward_average == 'gm':
                var_hat = torch.where(averaged, gm, s)  # 2. In the warm-up s alone
        self._update_running_var(var_hat)  # 5.
        return var_hat, averaged, outlier

    def average_gradient(self, g: Tensor, step: Step) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Backward 2 to 4, Eq. 17."""
        psi, record, newest = self.psi, None, g
        if self.gradient_record is not None:
            record = push(self.gradient_record, g if step.outlier is None else torch.where(step.outlier, psi, g))
            newest = torch.where(step.averaged, arithmetic_mean(record), g)  # 3.
        if self.backward_momentum:
            newest = moving_average(psi, newest, self.alpha)
        used = torch.where(step.averaged, newest, g)  # 2. In the warm-up and on an outlier step, the exact gradient
        if step.outlier is not None:
            newest = torch.where(step.outlier, psi, newest)  # 4. keeps psi, and records it in place of g
        return used, newest, record


@MODELS.register_module()
class SyncUN(UN):
    """:class:`UN` with statistics and an outlier decision over the tokens of all processes together.

    Processes may have different numbers of tokens, or none. Outside of a distributed run and in `eval()` it is UN.
    Every process has to run the same norms in the same order, forward and backward. Checkpoints
    are UN's. `convert_sync` and `revert_sync` do the same for a model of any offline norms.
    """
    synchronized = True


class _Normalize(Function):
    """Forward 4 with its estimated gradient: `weight * (x - mean) / sqrt(var_hat + eps) + bias + eta * x`.

    `eta` is `(1,)`, or None for 0; `valid` None or bool `x.shape[:-1]`, False where a token is padding. The backward
    pass asks the norm once for the gradient statistics of the step.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, eta, norm, step, valid):
        scale = weight * step.rstd if step.scale is None else step.scale
        # Detached: torch 2.1 drops the hooks of a parameter that is saved within a checkpoint.
        ctx.save_for_backward(x, weight.detach(), scale, step.rstd, step.mean, eta, valid)
        ctx.norm, ctx.step = norm, step
        passes = kernels.triton_for(norm, x, valid) or reference
        return passes.affine(x, *_scale_and_shift(scale, bias, step.mean, eta))  # 4. Eq. 4-5

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight, scale, rstd, mean, eta, valid = ctx.saved_tensors
        dy = dy.contiguous()
        dweight, dbias, psi, g_mean = ctx.norm._backward_statistics(ctx.step, dy, x, weight, rstd, mean, valid)
        dx = deta = None
        if ctx.needs_input_grad[0]:  # 5. Eq. 9: (weight * dy - g_mean - (x - mean) * rstd * psi) * rstd
            at_zero = None  # what does not depend on x and dy
            if mean is not None:
                at_zero = rstd * (mean * rstd * psi if g_mean is None else mean * rstd * psi - g_mean)
            direct = scale if eta is None else scale + eta
            passes = kernels.triton_for(ctx.norm, x, valid) or reference
            dx = passes.input_gradient(dy, x, direct, psi, rstd, at_zero, valid)
        if eta is not None:  # sum(dy * x)
            deta = (dweight / rstd if mean is None else dweight / rstd + mean * dbias).sum().view(1)
        return dx, dweight, dbias, deta, None, None, None


def _scale_and_shift(scale: Tensor, bias: Tensor, mean: Tensor | None, eta: Tensor | None) -> tuple[Tensor, Tensor]:
    """`scale * (x - mean) + bias + eta * x` as one scale and shift of x, two `(C,)` tensors."""
    shift = bias if mean is None else torch.addcmul(bias, mean, scale, value=-1)
    return (scale if eta is None else scale + eta), shift
