"""Weight averaging that includes the statistics of offline norms."""
from mmengine.model import ExponentialMovingAverage
from mmengine.registry import MODELS
from torch import nn


@MODELS.register_module()
class BufferedEMA(ExponentialMovingAverage):
    """Exponential moving average of weights and statistics, for `EMAHook(ema_type='BufferedEMA')`.

    mmengine's default pairs averaged weights with the newest statistics, which were measured with other weights. With
    `update_buffers=True` it also averages the statistics, but integer buffers, such as a norm's counters, keep their
    first value. This class copies them from the model.

    Args:
        model (nn.Module): the model to average.
        momentum (float): weight of the new value. Defaults to 0.0002.
        interval (int): steps between two updates. Defaults to 1.
    """

    def __init__(self, model: nn.Module, momentum: float = 0.0002, interval: int = 1):
        super().__init__(model, momentum=momentum, interval=interval, update_buffers=True)

    def update_parameters(self, model: nn.Module) -> None:
        """Updates the averages with `model`, and copies its counters."""
        super().update_parameters(model)
        source = model.state_dict()
        for name, average in self.avg_parameters.items():
            if not average.is_floating_point():
                average.copy_(source[name])
