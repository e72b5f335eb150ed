"""Unified Normalization (Algorithm 2 with Eq. 18-19 of arXiv 2208.01313)."""
from __future__ import annotations

from mmengine.registry import MODELS
from torch import Tensor

from .base import check_choice
from .offline import OfflineNorm
from .sync import Ranks


@MODELS.register_module()
class UN(OfflineNorm):
    """Unified Normalization over tokens: trains like LayerNorm, and is one multiply and add at inference.

    Training normalizes by the geometric mean of the last `window` mean squares, estimates the gradient
    by a moving average over the arithmetic mean of the last `window` gradient statistics, and drops every
    average on a step whose statistics hold an outlier (Eq. 18-19). During warm-up each step uses its own
    statistic, with the exact gradient. What it does with inf and NaN, and its state, all of which is in
    `state_dict`, are :class:`OfflineNorm`'s.

    Args:
        num_features (int): channels C of the `(..., C)` input.
        window (int | tuple[int, int]): M, how many steps are averaged; a pair is (forward, backward).
            Defaults to 4.
        alpha (float): weight of the OLD value in `running_var` and `psi` (Eq. 12), in [0, 1); 1 minus
            what BatchNorm calls momentum. Defaults to 0.9.
        warmup_iters (int | float): training steps with exact statistics, or a share of the run, such as 0.1. An int
            counts the forward passes of this layer. Defaults to 4000, right for COCO and ImageNet; a short run needs
            fewer.
        outlier_filter (bool): recommended for vision. Defaults to True.
        outlier_variance (str): 'layer' takes V in Eq. 19 as one number over all channels; 'channel' as one
            for each channel, which fires on nearly every step and is there for study. Defaults to 'layer'.
        forward_average (str): average over the activation statistics: 'gm', 'am', 'ema' (with `alpha`) or
            'current', which takes this step's alone. The paper's Table 5 compares. Defaults to 'gm'.
        backward_average (str): average over the gradient statistics: 'am' or 'current'. Defaults to 'am'.
        backward_momentum (bool): whether that average passes through a moving average with `alpha`.
            Defaults to True.
        centered (bool | str): whether to take the mean over tokens off: the current step's, with its exact gradient.
            The variance about it is averaged and filtered as the mean square is else. 'frozen' subtracts the
            `running_mean` of the checkpoint that the run starts from, and does not change it: right for a detector on
            a backbone that was pretrained with True. OfflineNormHook refuses it where no mean has been loaded. In
            eval mode both are the same. `--norm` of the tools chooses between them; a config names one. Not of the
            paper. Defaults to False.
        eta (float, optional): adds `eta * x` as RepBN does; the learnable number `eta` starts here. Not of the
            paper. Defaults to None, for no such term.
        eps (float): added to the variance. Defaults to 1e-5.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(self,
                 num_features: int,
                 window: int | tuple[int, int] = 4,
                 alpha: float = 0.9,
                 warmup_iters: int | float = 4000,
                 outlier_filter: bool = True,
                 outlier_variance: str = 'layer',
                 forward_average: str = 'gm',
                 backward_average: str = 'am',
                 backward_momentum: bool = True,
                 centered: bool | str = False,
                 eta: float | None = None,
                 eps: float = 1e-5):
        super().__init__(
            num_features,
            forward_average=check_choice('forward_average', forward_average, ('gm', 'am', 'ema', 'current')),
            backward_average=check_choice('backward_average', backward_average, ('am', 'current')),
            backward_momentum=backward_momentum,
            window=window,
            alpha=alpha,
            warmup_iters=warmup_iters,
            outlier_filter=outlier_filter,
            outlier_variance=outlier_variance,
            centered=centered,
            eta=eta,
            eps=eps)

    def extra_repr(self) -> str:
        return (f'{super().extra_repr()}, window={self.window}, warmup_iters={self.warmup_iters}, '
                f'outlier_filter={self.outlier_filter}, forward_average={self.forward_average!r}, '
                f'backward_average={self.backward_average!r}, backward_momentum={self.backward_momentum}, '
                f'centered={self.centered!r}')


class ChannelsFirst:
    """Mixed into a norm over tokens, it makes that one for `(N, C, H, W)` maps: every position is a token.

    `pad_mask` is `(N, H, W)`. The output keeps the shape and dtype; its memory may be channels-last.
    """

    def forward(self, x: Tensor, pad_mask: Tensor | None = None, data_format: str = 'channel_first') -> Tensor:
        """Normalizes `x`; with 'channel_last', as mmpretrain's LN2d can be called, that is `(N, H, W, C)`."""
        if x.dim() != 4:
            raise ValueError(f'{type(self).__name__}: x must be (N, C, H, W), got shape {tuple(x.shape)}')
        if data_format == 'channel_last':
            return super().forward(x, pad_mask)
        return super().forward(x.permute(0, 2, 3, 1), pad_mask).permute(0, 3, 1, 2)


@MODELS.register_module()
class UN2d(ChannelsFirst, UN):
    """:class:`UN` for `(N, C, H, W)` maps."""


@MODELS.register_module()
class SyncUN(UN):
    """:class:`UN` whose statistics and outlier decision are those of all processes' tokens together.

    Processes may have different numbers of tokens, or none. Outside of a distributed run it is UN; so it is
    in `eval()`. Every process has to run the same norms in the same order, forward and backward. Checkpoints
    are UN's. `convert_sync` and `revert_sync` do the same for a model of any offline norms.
    """
    ranks = Ranks()
