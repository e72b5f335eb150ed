"""What `--amp` means where mmengine's AmpOptimWrapper, which needs a GPU, cannot go."""
from contextlib import contextmanager

import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from mmengine.runner.amp import autocast
from torch import nn


@OPTIM_WRAPPERS.register_module()
class BFloat16OptimWrapper(OptimWrapper):
    """Mixed precision in bfloat16, on a CPU too; its range is float32's, so no loss scale is needed.

    Arguments are those of :class:`mmengine.optim.OptimWrapper`.
    """

    @contextmanager
    def optim_context(self, model: nn.Module):
        """The context in which a training step's forward pass and loss are computed."""
        with super().optim_context(model), autocast(dtype=torch.bfloat16):
            yield
