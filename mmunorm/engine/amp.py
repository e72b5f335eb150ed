"""`--amp` on a CPU; mmengine's AmpOptimWrapper needs a GPU."""
from contextlib import contextmanager, nullcontext

import torch
from mmengine.device import get_device
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from mmengine.runner.amp import autocast
from torch import nn

from ..attention import plain_attention


@OPTIM_WRAPPERS.register_module()
class BFloat16OptimWrapper(OptimWrapper):
    """Trains with mixed precision in bfloat16, on a CPU too.

    bfloat16 has the range of float32, so no loss scale is needed. The arguments are those of
    :class:`mmengine.optim.OptimWrapper`.
    """

    @contextmanager
    def optim_context(self, model: nn.Module):
        """The context in which a training step's forward pass and loss are computed."""
        # Backward in bfloat16 on a CPU, torch's flash attention takes five times as long as the plain one.
        attention = plain_attention() if get_device() == 'cpu' else nullcontext()
        with attention, super().optim_context(model), autocast(dtype=torch.bfloat16):
            yield
