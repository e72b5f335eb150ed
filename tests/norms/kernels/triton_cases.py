"""Every Triton kernel beside the reference, in Triton's interpreter or on a GPU; run by test_triton.py."""
from __future__ import annotations

import itertools
import os
import sys
from unittest import mock

import torch
import triton
import triton.language as tl

from mmunorm.norms.kernels import reference
from mmunorm.norms.kernels import triton as kernels

from .averages_cases import SIZES, check_averages

DEVICE = 'cpu' if os.environ.get('TRITON_INTERPRET') == '1' else 'cuda'
SHAPES = [(1, 1), (3, 5, 7), (1, 33, 130), (9000, 3)]
# With two programs, each of which then has several tiles.
LONG_SHAPES = [(2, 301, 96), (1, 333, 130), (9000, 3)]
DTYPES = [torch.float32, torch.float16]
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
    weight, direct, slope, shift = (draw(shape[-1]) for _ in range(4))
    mean, constant = (draw(shape[-1]), draw(shape[-1])) if centered else (None, None)
    valid = None
    if masked:
        valid = (torch.rand(shape[:-1], generator=generator) < .7).to(DEVICE)
        valid.view(-1)[0] = True
    clean = x
    if masked:
        x = torch.where(valid.unsqueeze(-1), x, float('nan'))  # what is padded must not count
    count = reference.count_tokens(x, valid)
    close(kernels.square_sum(x, valid) / count, reference.square_sum(x, valid) / count)
    x = clean
    with torch.no_grad():
        close(kernels.affine(x, weight, shift), reference.affine(x, weight, shift), dtype)
    size = float(dy.float().abs().mul(x.float().abs() + 1).sum()) ** .5
    ours = kernels.gradient_sums(dy, x, mean, valid)
    for a, b in zip(ours, reference.gradient_sums(dy, x, mean, valid), strict=True):
        close(a, b, scale=size)
    again = kernels.gradient_sums(dy, x, mean, valid)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    args = dy, x, direct, slope, constant, valid
    ours, theirs = kernels.input_gradient(*args), reference.input_gradient(*args)
    assert ours.dtype == dtype
    close(ours, theirs, dtype)


def check_all(shapes, dtypes):
    for case in itertools.product(shapes, dtypes, (False, True), (False, True)):
        try:
            check(*case)
        except AssertionError as error:
            sys.exit(f'{kernels._PROGRAMS} programs, {case}: {error}')


if __name__ == '__main__':
    try:
        _ones[(1, )](torch.empty(4, device=DEVICE), 4)
    except Exception:
        if DEVICE == 'cuda':
            raise
        print("this Triton's interpreter runs no kernel that has constants")
        sys.exit(77)  # test_triton.py skips
    check_all(SHAPES, DTYPES)
    mock.patch('mmunorm.norms.kernels.for_averages', lambda record: kernels).start()
    for sizes in SIZES:
        for settings in itertools.product((False, True), repeat=3):
            check_averages(*sizes, *settings, device=DEVICE)
    kernels._PROGRAMS = 2
    check_all(LONG_SHAPES, [torch.float32])
    print('all cases agree')
