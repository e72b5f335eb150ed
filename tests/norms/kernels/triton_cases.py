"""UN's steps in Triton against plain torch, in Triton's interpreter or on a GPU; run by test_triton.py."""
from __future__ import annotations

import copy
import os
import sys
from contextlib import contextmanager
from unittest import mock

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

from mmunorm.norms import UN
from mmunorm.norms.kernels import triton as kernels

DEVICE = 'cpu' if os.environ.get('TRITON_INTERPRET') == '1' else 'cuda'
# Of one rounding to the dtype of the activations, which may fall to either side.
ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3}
# Of inputs and gradients. The sum of their squares, or of the gradients, over the steps of a window overflows.
HUGE_X, HUGE_DY = (1.1e19, 1.), (1., 1.2e38)
CASES = [
    dict(shape=(1, 9, 130)),
    dict(shape=(3, 50, 7), dtype=torch.float16, loss_scale=4.),
    dict(shape=(3, 5, 7), eta=0.5),
    dict(shape=(1, 33, 130), dtype=torch.float16, outlier_filter=False),
    *(dict(shape=(1, 96), outlier_filter=filtered, sizes=sizes, loss_scale=scale)
      for filtered, sizes, scale in ((True, HUGE_X, 4.), (True, HUGE_DY, None), (False, HUGE_X, None),
                                     (False, HUGE_DY, None))),
    *(dict(shape=(1, channels), window=window) for channels, window in ((1, 1), (130, 1), (7, 9))),
]
# With two programs, each of which then has several tiles.
LONG_CASES = [dict(shape=(3000, 3)), dict(shape=(1, 133, 130))]


@triton.jit
def _ones(out, NUMBER: tl.constexpr):
    tl.store(out + tl.arange(0, NUMBER), 1.0)


def check(shape, dtype=torch.float32, window=4, outlier_filter=True, eta=None, loss_scale=None, sizes=(1., 1.)):
    """Nine steps of UN in Triton, three launches forward and three backward, and in plain torch.

    In warm-up, averaged, not finite, with an outlier. Equal inputs have equal results in Triton.
    """
    plain = UN(shape[-1], window=window, warmup_iters=2, outlier_filter=outlier_filter, eta=eta)
    generator = torch.Generator().manual_seed(shape[-1])
    is_huge = sizes != (1., 1.)
    if not is_huge:
        plain.weight.data.normal_(generator=generator)
    plain.exact_steps = 2
    plain.loss_scale = None if loss_scale is None else torch.tensor(loss_scale, device=DEVICE)
    fused, again = copy.deepcopy(plain.to(DEVICE)), copy.deepcopy(plain)
    plain.has_triton_kernels = False
    for t in range(1, 10):
        x, dy = (size * (torch.rand(shape, generator=generator) + .5) if is_huge else
                 torch.randn(shape, generator=generator) for size in sizes)
        if t == 4:
            x.view(-1)[0], x.view(-1)[-1] = float('nan'), float('inf')
        if t in (2, 5):
            dy.view(-1)[0] = float('inf')
        if t == 7 and not is_huge:
            x *= 100
        x, dy = x.to(DEVICE, dtype), dy.to(DEVICE, dtype)
        results = []
        for norm in (plain, fused, again):
            leaf = x.clone().requires_grad_()
            with Launches(norm is not plain) as forward:
                y = norm(leaf)
            with Launches(norm is not plain) as backward:
                gradients = torch.autograd.grad(y, [leaf, *norm.parameters()], dy)
            results.append((y.detach(), *gradients))
            if norm is not plain and eta is None:
                assert forward.launched == backward.launched == 3 * ['Triton'], (forward.launched, backward.launched)
        for theirs, ours, repeated in zip(*results, strict=True):
            size = 1 + max(float(values.abs().nan_to_num(posinf=0).max()) for values in (theirs, dy))
            rounding = 4 * ROUNDING[dtype]
            torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding * size, equal_nan=True)
            torch.testing.assert_close(ours, repeated, rtol=0, atol=0, equal_nan=True)
        for ours, theirs in zip(fused.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=5e-5, atol=1e-6)  # of a log of huge numbers
    assert all(buffer.isfinite().all() for buffer in fused.buffers())
    if outlier_filter and 1 < window < 9 and not is_huge:
        assert plain.num_outliers > 0


class Launches(TorchDispatchMode):
    """The kernels that run, of torch or of Triton: operators that allocate or return a view launch none."""

    def __init__(self, triton):
        super().__init__()
        self.launched, self.in_interpreter = [], False
        self.patches = [mock.patch.object(kernels, '_on', self.triton_launch)]
        if triton:
            self.patches.append(mock.patch('mmunorm.norms.kernels.triton_for', lambda *step: kernels))

    @contextmanager
    def triton_launch(self, x):
        self.launched.append('Triton')
        self.in_interpreter = True
        yield
        self.in_interpreter = False

    def __enter__(self):
        for patch in self.patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        for patch in self.patches:
            patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        is_view = any(value.alias_info and not value.alias_info.is_write for value in operator._schema.returns)
        if not (is_view or 'empty' in str(operator) or self.in_interpreter):
            self.launched.append(str(operator))
        return operator(*args, **kwargs or {})


if __name__ == '__main__':
    try:
        _ones[(1, )](torch.empty(4, device=DEVICE), 4)
    except Exception:
        if DEVICE == 'cuda':
            raise
        print("this Triton's interpreter runs no kernel that has constants")
        sys.exit(77)  # test_triton.py skips
    for case in CASES:
        check(**case)
    kernels._PROGRAMS = 2
    for case in LONG_CASES:
        check(**case)
    print('all cases agree')
