"""Unified Normalization (Algorithm 2 with Eq. 18-19 of arXiv 2208.01313)."""
from __future__ import annotations

from ..registry import MODELS
from .base import check_choice
from .offline import OfflineNorm
from .sync import Ranks


@MODELS.register_module()
class UN(OfflineNorm):
    """Unified Normalization over tokens: trains like LayerNorm, and is one multiply and add at inference.

    Training normalizes by the geometric mean of the last `window` mean squares, estimates the gradient
    by a moving average over the arithmetic mean of the last `window` gradient statistics, and drops every
    average on a step whose statistics hold an outlier (Eq. 18-19). During warm-up each step uses its own
    statistic, with the exact gradient. :class:`OfflineNorm` says what happens with inf and NaN, and names the state.

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
        outlier_variance (str): 'layer' takes V in Eq. 19 as one number over all channels; 'channel', for study, as
            one for each, which fires on nearly every step. Defaults to 'layer'.
        forward_average (str): average over the activation statistics: 'gm', 'am', 'ema' (with `alpha`) or
            'current', which takes this step's alone. The paper's Table 5 compares. Defaults to 'gm'.
        backward_average (str): average over the gradient statistics: 'am' or 'current'. Defaults to 'am'.
        backward_momentum (bool): whether that average passes through a moving average with `alpha`.
            Defaults to True.
        centered (bool | str): whether to subtract the mean over tokens: the current step's, with its exact gradient.
            The variance about it is then averaged and filtered in place of the mean square. 'frozen' subtracts the
            `running_mean` of the checkpoint that the run starts from, and does not change it: right for a detector on
            a backbone that was pretrained with True. In eval mode both are the same. `--norm` of the tools chooses
            between them; a config names one. Not of the paper. Defaults to False.
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
        check_choice('forward_average', forward_average, ('gm', 'am', 'ema', 'current'))
        check_choice('backward_average', backward_average, ('am', 'current'))
        super().__init__(
            num_features, forward_average=forward_average, backward_average=backward_average,
            backward_momentum=backward_momentum, window=window, alpha=alpha, warmup_iters=warmup_iters,
            outlier_filter=outlier_filter, outlier_variance=outlier_variance, centered=centered, eta=eta, eps=eps)


@MODELS.register_module()
class SyncUN(UN):
    """:class:`UN` with statistics and an outlier decision over the tokens of all processes together.

    Processes may have different numbers of tokens, or none. Outside of a distributed run and in `eval()` it is UN.
    Every process has to run the same norms in the same order, forward and backward. Checkpoints
    are UN's. `convert_sync` and `revert_sync` do the same for a model of any offline norms.
    """
    ranks = Ranks()
