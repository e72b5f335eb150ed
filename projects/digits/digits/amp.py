"""Mixed precision on a CPU; mmengine's AmpOptimWrapper needs a GPU."""
from contextlib import contextmanager, nullcontext

import torch
from mmengine.device import get_device
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from mmengine.runner.amp import autocast
from torch import nn

from mmunorm.benchmark.measure import plain_attention


@OPTIM_WRAPPERS.register_module()
class BFloat16OptimWrapper(OptimWrapper):
    """Mixed-precision training in bfloat16, also on a CPU; arguments are those of mmengine's OptimWrapper.

    bfloat16 has the range of float32, so no loss scale is needed.
    """

    @contextmanager
    def optim_context(self, model: nn.Module):
        """The context of a training step's forward pass and loss."""
        # On a CPU, the backward pass of torch's flash attention in bfloat16 takes five times as long as the plain one.
        attention = plain_attention() if get_device() == 'cpu' else nullcontext()
        with attention, super().optim_context(model), autocast(dtype=torch.bfloat16):
            yield
