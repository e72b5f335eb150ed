"""Records what the residual layers of a model do while it trains."""
from __future__ import annotations

from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from ..hooks import unwrapped_model
from ..norms.base import check_count
from ..recording.layers import LayerTap, append_layers, begin_layers
from ..residuals import ResidualLayer
from ..utils import PreflightError


@HOOKS.register_module()
class LayerStatisticsHook(Hook):
    """Records each residual layer's gradient norm, likeness to the layer before, and activity, into `layers.csv`.

    :class:`mmunorm.recording.layers.LayerTap` says what these are; `tools/analysis/depth.py` draws them. The file is in
    the work directory. Gradients do not contain the loss scale of mixed precision, and are of one iteration where
    several are accumulated. In a distributed run, the numbers are those of the first process.

    Args:
        first (int): record each of so many steps at the start. Defaults to 100.
        interval (int): afterwards, record every n-th step. Defaults to 100.
        threshold (float): what counts as zero behind an activation. ReLU gives zeros, GELU hardly any. Defaults to
            0.01.

    Raises:
        ValueError: `first` or `interval` is out of its range.
        PreflightError: when training begins: no layer of the model has a residual scheme.
    """

    def __init__(self, first: int = 100, interval: int = 100, threshold: float = 0.01):
        self.first = check_count('first', first, least=0)
        self.interval = check_count('interval', interval, least=1)
        self.threshold = threshold
        self._taps: dict[str, LayerTap] = {}

    def before_train(self, runner) -> None:
        if not is_main_process():
            return
        layers = {name: module for name, module in unwrapped_model(runner).named_modules()
                  if isinstance(module, ResidualLayer)}
        if not layers:
            raise PreflightError('LayerStatisticsHook: no layer of the model has a residual scheme; take '
                                 'UNVisionTransformer, UNSwinTransformer or UNT2TViT as its backbone.')
        begin_layers(runner.work_dir, runner.iter)
        self._taps = {name: LayerTap(layer, self.threshold) for name, layer in layers.items()}

    def before_train_iter(self, runner, batch_idx: int, data_batch=None) -> None:
        if not self._taps or not self._is_recorded(runner.iter + 1):
            return
        scaler = getattr(runner.optim_wrapper, 'loss_scaler', None)
        self._loss_scale = scaler.get_scale() if hasattr(scaler, 'get_scale') else 1.  # the step may change it
        for tap in self._taps.values():
            tap.open()

    def after_train_iter(self, runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        if self._taps and self._is_recorded(runner.iter + 1):
            rows = [(name, *tap.close(self._loss_scale)) for name, tap in self._taps.items()]
            append_layers(runner.work_dir, runner.iter + 1, rows)

    def after_train(self, runner) -> None:
        for tap in self._taps.values():
            tap.remove()
        self._taps = {}

    def _is_recorded(self, step: int) -> bool:
        return step <= self.first or step % self.interval == 0
