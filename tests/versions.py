"""Features that an old release of torch or Triton lacks, by trying them. The rest has to work in every release."""
from contextlib import nullcontext
from functools import cache, partial
from inspect import signature

import pytest
import torch
import torch.export
from mmengine.optim import OptimWrapper
from mmengine.optim.optimizer import amp_optimizer_wrapper
from torch import nn
from torch.distributed import fsdp
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from mmunorm.compat import GradScaler


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
# FSDP1 makes one.
needs_cpu_stream = pytest.mark.skipif(_raises(lambda: torch.cpu.stream(torch.cpu.Stream(priority=0))),
                                      reason="this torch's FullyShardedDataParallel needs a GPU")


class _OldGradScaler(GradScaler):
    """The older releases' scaler is for CUDA alone: the same arithmetic for a CPU."""

    def __init__(self, init_scale=2.**16, growth_factor=2., backoff_factor=0.5, growth_interval=2000, enabled=True):
        self._value, self._steps, self._finite = init_scale, 0, {}
        self._factors, self._interval = (backoff_factor, growth_factor), growth_interval

    def scale(self, outputs):
        return outputs * self._value

    def get_scale(self):
        return self._value

    def unscale_(self, optimizer):
        gradients = [p.grad for group in optimizer.param_groups for p in group['params'] if p.grad is not None]
        for gradient in gradients:
            gradient /= self._value
        self._finite[optimizer] = all(gradient.isfinite().all() for gradient in gradients)

    def step(self, optimizer):
        if optimizer not in self._finite:
            self.unscale_(optimizer)
        if self._finite[optimizer]:
            optimizer.step()

    def update(self, new_scale=None):
        if new_scale is not None:
            self._value = float(new_scale)
            return
        finite = all(self._finite.values())
        self._finite = {}
        self._steps = self._steps + 1 if finite else 0
        if not finite or self._steps == self._interval:
            self._value, self._steps = self._value * self._factors[finite], 0

    def state_dict(self):
        return dict(scale=self._value)


CPUGradScaler = partial(torch.amp.GradScaler, 'cpu') if hasattr(torch.amp, 'GradScaler') else _OldGradScaler


def amp_on_a_cpu(monkeypatch):
    """Lets mmengine's AmpOptimWrapper run on a CPU, which it would refuse; without autocast, for the scale alone."""
    monkeypatch.setattr(amp_optimizer_wrapper, 'is_cuda_available', lambda: True)
    monkeypatch.setattr(amp_optimizer_wrapper, 'GradScaler', CPUGradScaler)
    monkeypatch.setattr(amp_optimizer_wrapper.AmpOptimWrapper, 'optim_context', OptimWrapper.optim_context)


needs_rms_norm = pytest.mark.skipif(not hasattr(nn, 'RMSNorm'), reason='this torch has no nn.RMSNorm')
needs_fully_shard = pytest.mark.skipif(not hasattr(fsdp, 'fully_shard'), reason='this torch has no fully_shard')
needs_fused_adamw = pytest.mark.skipif(
    _raises(lambda: nullcontext(torch.optim.AdamW([nn.Parameter(torch.ones(1))], fused=True))),
    reason='this torch has no fused AdamW on a CPU, which the benchmark uses')
# With open shapes, the option keeps torch.export from guards on sizes.
needs_open_export = pytest.mark.skipif(
    'prefer_deferred_runtime_asserts_over_guards' not in signature(torch.export.export).parameters,
    reason='this torch.export has no prefer_deferred_runtime_asserts_over_guards')
