"""Every Triton kernel against the reference, in Triton's interpreter or on a GPU; run by test_triton.py."""
from __future__ import annotations

import copy
import itertools
import os
import sys
from contextlib import contextmanager
from unittest import mock

import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

from mmunorm.norms import UN
from mmunorm.norms.kernels import reference
from mmunorm.norms.kernels import triton as kernels

# Channels, window, and the settings `filtered`, `centered` and `huge`, of which each two have every combination.
AVERAGES = [(96, 4, False, False, False), (96, 4, False, True, True), (96, 4, True, False, True),
            (96, 4, True, True, False), *((*sizes, True, False, False) for sizes in ((1, 1), (130, 1), (7, 9)))]
DEVICE = 'cpu' if os.environ.get('TRITON_INTERPRET') == '1' else 'cuda'
SHAPES = [(1, 1), (3, 5, 7), (1, 33, 130)]
# With two programs, each of which then has several tiles.
LONG_SHAPES = [(1, 133, 130), (3000, 3)]
# Of one rounding to the dtype of the activations, which may fall to either side.
ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3}


@triton.jit
def _ones(out, NUMBER: tl.constexpr):
    tl.store(out + tl.arange(0, NUMBER), 1.0)


def close(ours, theirs, dtype=torch.float32, scale=1.):
    torch.testing.assert_close(ours, theirs, rtol=ROUNDING[dtype] * 4, atol=ROUNDING[dtype] * 4 * scale)


def check(shape, dtype, masked, centered):
    generator = torch.Generator().manual_seed(hash((shape, masked)) % 1000)

    def draw(*size):
        return torch.randn(size, generator=generator).to(DEVICE)

    x, dy = (2 * draw(*shape) + 1).to(dtype), draw(*shape).to(dtype)
    weight, direct, psi, shift = (draw(shape[-1]) for _ in range(4))
    rstd = draw(shape[-1]).abs()
    mean, constant = (draw(shape[-1]), draw(shape[-1])) if centered else (None, None)
    valid = None
    if masked:
        valid = (torch.rand(shape[:-1], generator=generator) < .7).to(DEVICE)
        valid.view(-1)[0] = True
    clean = x
    if masked:
        x = torch.where(valid.unsqueeze(-1), x, float('nan'))  # padding must not count
    close(kernels.second_moment(x, valid), reference.second_moment(x, valid))
    x = clean
    with torch.no_grad():
        close(kernels.affine(x, weight, shift), torch.addcmul(shift, x, weight).to(dtype), dtype)
    size = float(dy.float().abs().mul(x.float().abs() + 1).sum()) ** .5
    ours = kernels.gradient_sums(dy, x, rstd, mean, valid)
    for a, b in zip(ours, reference.gradient_sums(dy, x, rstd, mean, valid), strict=True):
        if b is not None:
            close(a, b, scale=size)
    again = kernels.gradient_sums(dy, x, rstd, mean, valid)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    args = dy, x, direct, psi, rstd, constant, valid
    ours, theirs = kernels.input_gradient(*args), reference.input_gradient(*args)
    assert ours.dtype == dtype
    close(ours, theirs, dtype)


def check_all(cases):
    for case in cases:
        try:
            check(*case)
        except AssertionError as error:
            sys.exit(f'{kernels._PROGRAMS} programs, {case}: {error}')


def check_averages(channels, window, filtered, centered, huge):
    """Eight steps of UN in Triton and in plain torch: in warm-up, averaged, not finite, with an outlier."""
    plain = UN(channels, window=window, warmup_iters=2, outlier_filter=filtered, centered=centered).to(DEVICE)
    plain.exact_steps = 2
    fused = copy.deepcopy(plain)
    plain.uses_fused_update = False
    generator = torch.Generator().manual_seed(channels)
    x = torch.ones(1, channels, device=DEVICE)
    for t in range(1, 9):
        measured = (torch.rand(1 + centered, channels, generator=generator) + .5).to(DEVICE)
        g = torch.randn(channels, generator=generator).abs().clamp(max=3).to(DEVICE)
        if huge:  # sums of such overflow
            measured, g = measured * 1e38, g * 1e38
        if t == 4:
            measured[0, 0], measured[0, -1] = float('nan'), float('inf')
        if t in (2, 5):
            g[0] = float('inf')
        if t == 7 and not huge:
            measured[0, 0] = 1e6
        results = []
        for norm in (plain, fused):
            norm.loss_scale = None if t % 3 else torch.tensor(4., device=DEVICE)
            norm._measure = lambda *_, measured=measured: measured if centered else measured[0]
            step = norm._new_step(x, None)
            psi, _ = norm._gradient_statistics(step, g, torch.ones_like(g) if centered else None)
            results.append((step.rstd, step.averaged, step.outlier, step.mean, psi))
        same(*results)
        same(plain.buffers(), fused.buffers())
    assert all(buffer.isfinite().all() for buffer in fused.buffers())
    if filtered and 1 < window < 9 and channels > 1 and not huge:
        assert plain.num_outliers > 0


def check_whole_steps(shape, dtype, loss_scale):
    """Eight steps of UN in Triton, three launches forward and three backward, and in plain torch."""
    plain = UN(shape[-1], warmup_iters=2).to(DEVICE)
    fused = copy.deepcopy(plain)
    plain.uses_fused_update = False
    plain.loss_scale = fused.loss_scale = loss_scale
    generator = torch.Generator().manual_seed(shape[-1])
    for t in range(1, 9):
        x, dy = torch.randn(2, *shape, generator=generator).mul(1 + 99 * (t == 7)).to(DEVICE, dtype)
        results = []
        for norm in (plain, fused):
            leaf = x.clone().requires_grad_()
            with Launches(norm is fused) as forward:
                y = norm(leaf)
            with Launches(norm is fused) as backward:
                gradients = torch.autograd.grad(y, (leaf, norm.weight, norm.bias), dy)
            results.append((y, *gradients))
        assert forward.launched == backward.launched == 3 * ['Triton'], (forward.launched, backward.launched)
        for ours, theirs in zip(*results, strict=True):
            close(ours, theirs, dtype, scale=float(theirs.detach().abs().max()) + 1)
        same(plain.buffers(), fused.buffers())
    assert plain.num_outliers > 0


class Launches(TorchDispatchMode):
    """The kernels that run, of torch or of Triton: operators that allocate or return a view launch none."""

    def __init__(self, triton):
        super().__init__()
        self.launched, self.in_interpreter = [], False
        self.patches = [mock.patch.object(kernels, '_on', self.triton_launch)]
        if triton:
            self.patches.append(mock.patch('mmunorm.norms.kernels.triton_passes', lambda *tokens: kernels))

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


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=5e-5, atol=1e-6)  # of a log of huge numbers


if __name__ == '__main__':
    try:
        _ones[(1, )](torch.empty(4, device=DEVICE), 4)
    except Exception:
        if DEVICE == 'cuda':
            raise
        print("this Triton's interpreter runs no kernel that has constants")
        sys.exit(77)  # test_triton.py skips
    check_all(itertools.product(SHAPES, [torch.float32], (False, True), (False, True)))
    check_all((shape, torch.float16, masked, masked) for shape in SHAPES[1:] for masked in (False, True))
    mock.patch('mmunorm.norms.kernels.fused_update', lambda dtype, *records: kernels).start()
    for case in AVERAGES:
        check_averages(*case)
    for shape, dtype, scale in (((1, 9, 130), torch.float32, None), ((3, 50, 7), torch.float16, 4.)):
        check_whole_steps(shape, dtype, None if scale is None else torch.tensor(scale, device=DEVICE))
    kernels._PROGRAMS = 2
    check_whole_steps((3000, 3), torch.float32, None)
    check_all((shape, torch.float32, masked, masked) for shape in LONG_SHAPES for masked in (False, True))
    print('all cases agree')
