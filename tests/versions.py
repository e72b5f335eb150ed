"""Features that an old release of torch or Triton lacks, by trying them. The rest has to work in every release."""
from contextlib import nullcontext
from functools import cache

import pytest
import torch
import torch.export
from mmengine.optim import OptimWrapper
from mmengine.optim.optimizer import amp_optimizer_wrapper
from torch import nn
from torch.distributed import fsdp
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint


class _Calls(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x * 1

    @staticmethod
    def backward(ctx, dy):
        return ctx.function(dy), None


@cache
def sees_slices():
    """Whether a TorchFunctionMode sees that a parameter is sliced; that of torch 2.1 does not."""
    class Mode(TorchFunctionMode):
        found = False

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.found |= getattr(func, '__name__', '') == '__getitem__'
            return func(*args, **(kwargs or {}))

    with Mode() as mode:
        nn.Parameter(torch.ones(4))[:2]
    return mode.found


@cache
def compiles_as_one_graph():
    """Whether torch.compile takes an autograd function with a function among its arguments, as a norm has.

    Before 2.2 or so it leaves the graph there; what is computed is the same.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad():
            torch.compile(lambda x: _Calls.apply(x, lambda dy: dy), backend='eager',
                          fullgraph=True)(torch.ones(1, requires_grad=True))
    except Exception:
        return False
    return True


def is_one_graph(stock, *inputs):
    """Whether torch.compile takes a stock model of OpenMMLab, and our norms in its place, as a whole.

    Older releases leave the graph at the functions that mmengine decorates.
    """
    try:
        torch.compile(stock, backend='eager', fullgraph=True)(*inputs)
    except Exception:
        return False
    finally:
        torch._dynamo.reset()
    return compiles_as_one_graph()


@cache
def checkpoints_compiled_code():
    """Whether compiled code of torch's own layers runs in a checkpoint that is not reentrant."""
    layers = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2))
    try:
        checkpoint(torch.compile(layers, backend='aot_eager'), torch.ones(1, 2, requires_grad=True),
                   use_reentrant=False).sum().backward()
    except Exception:
        return False
    finally:
        torch._dynamo.reset()
    return True


def _raises(call):
    """Whether the context `call()` cannot be created or entered."""
    try:
        with call():
            pass
    except (AttributeError, ImportError, RuntimeError, TypeError):
        return True
    return False


needs_float16_autocast = pytest.mark.skipif(_raises(lambda: torch.autocast('cpu', torch.float16)),
                                            reason='this torch has no autocast to float16 on a CPU')
needs_float16_layer_norm = pytest.mark.skipif(
    _raises(lambda: nullcontext(nn.LayerNorm(2).half()(torch.ones(1, 2).half()))),
    reason='this torch has no LayerNorm in float16 on a CPU')


def cpu_grad_scaler(**arguments):
    """A gradient scaler; before torch 2.3 it is for CUDA alone, and the test is skipped."""
    if not hasattr(torch.amp, 'GradScaler'):
        pytest.skip('the gradient scaler of this torch is for CUDA alone')
    return torch.amp.GradScaler('cpu', **arguments)


def amp_on_a_cpu(monkeypatch):
    """Lets mmengine's AmpOptimWrapper run on a CPU, which it would refuse; without autocast, for the scale alone."""
    monkeypatch.setattr(amp_optimizer_wrapper, 'is_cuda_available', lambda: True)
    monkeypatch.setattr(amp_optimizer_wrapper, 'GradScaler', cpu_grad_scaler)
    monkeypatch.setattr(amp_optimizer_wrapper.AmpOptimWrapper, 'optim_context', OptimWrapper.optim_context)


needs_grouped_queries = pytest.mark.skipif('enable_gqa' not in nn.functional.scaled_dot_product_attention.__doc__,
                                           reason='this torch has no groups of queries')
needs_rms_norm = pytest.mark.skipif(not hasattr(nn, 'RMSNorm'), reason='this torch has no nn.RMSNorm')
needs_fully_shard = pytest.mark.skipif(not hasattr(fsdp, 'fully_shard'), reason='this torch has no fully_shard')
needs_fused_adamw = pytest.mark.skipif(
    _raises(lambda: nullcontext(torch.optim.AdamW([nn.Parameter(torch.ones(1))], fused=True))),
    reason='this torch has no fused AdamW on a CPU, which the benchmark uses')
