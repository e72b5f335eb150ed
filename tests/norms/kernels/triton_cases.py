"""Every Triton kernel beside the reference, in Triton's interpreter; run by test_triton.py."""
import copy
import itertools
import sys

import torch

from mmunorm.norms.kernels import reference
from mmunorm.norms.kernels import triton as kernels

SHAPES = [(1, 1), (3, 5, 7), (2, 50, 96), (1, 33, 130), (300, 1), (9000, 3)]
# With two programs, each of which then has several tiles.
LONG_SHAPES = [(2, 301, 96), (1, 333, 130), (9000, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of one rounding to the dtype of the activations, which may fall to either side.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def close(ours, theirs, dtype=torch.float32, scale=1.):
    torch.testing.assert_close(ours, theirs, rtol=ROUNDING[dtype] * 4, atol=ROUNDING[dtype] * 4 * scale)


def check(shape, dtype, masked, centered):
    generator = torch.Generator().manual_seed(hash((shape, masked)) % 1000)

    def draw(*size):
        return torch.randn(size, generator=generator)

    x, dy = (2 * draw(*shape) + 1).to(dtype), draw(*shape).to(dtype)
    weight, rstd, psi, shift = (draw(shape[-1]) for _ in range(4))
    mean, g_mean, eta = (draw(shape[-1]), draw(shape[-1]), draw(1)) if centered else (None, None, None)
    valid = None
    if masked:
        valid = torch.rand(shape[:-1], generator=generator) < .7
        valid.view(-1)[0] = True
    clean = x
    if masked:
        x = torch.where(valid.unsqueeze(-1), x, float('nan'))  # what is padded must not count
    close(kernels.second_moment(x, valid), reference.second_moment(x, valid))
    x = clean
    with torch.no_grad():
        close(kernels.normalize_forward(x, weight, shift),
              reference.normalize_forward(x, weight, shift), dtype)
    size = float(dy.float().abs().mul(x.float().abs() + 1).sum()) ** .5
    ours = kernels.normalize_backward(dy, x, weight, rstd, mean, valid)
    theirs = reference.normalize_backward(dy, x, weight, rstd, mean, valid)
    for a, b in zip(ours, theirs, strict=True):
        if b is None:
            assert a is None
        else:
            close(a, b, scale=size)
    again = kernels.normalize_backward(dy, x, weight, rstd, mean, valid)
    assert all(a is None or torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    args = dy, x, weight, rstd, psi, mean, g_mean, eta, valid
    ours, theirs = kernels.normalize_input_gradient(*args), reference.normalize_input_gradient(*args)
    assert ours.dtype == dtype
    close(ours, theirs, dtype)


def check_empty():
    x, c = torch.zeros(0, 5), torch.ones(5)
    with torch.no_grad():
        assert kernels.normalize_forward(x, c, c).shape == (0, 5)
    assert kernels.normalize_input_gradient(x, x, c, c, c).shape == (0, 5)
    assert kernels.second_moment(x).isnan().all()
    assert (kernels.normalize_backward(x, x, c, c)[0] == 0).all()


def same_state(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=5e-5, atol=1e-6)  # log of huge numbers


def check_step(channels, window, average, filtered, per_channel, huge=False):
    """Six steps forward: in warm-up, averaged, not finite, and with an outlier."""
    generator = torch.Generator().manual_seed(channels)
    records = filtered or average in ('gm', 'am')
    ours_state = [torch.ones(channels), torch.ones(window, channels) if records else None,
                  torch.tensor(0) if filtered else None]
    theirs_state = copy.deepcopy(ours_state)
    found = []
    for t in range(1, 7):
        measured = torch.rand(channels, generator=generator) + .5
        if huge:  # sums of such overflow
            measured = measured * 1e38
        if t == 4:
            measured[0], measured[-1] = float('nan'), float('inf')
        if t == 6 and not huge:
            measured[0] = 1e6
        args = dict(average=average, per_channel=per_channel, unsettled=2, alpha=.9)
        ours = kernels.advance(measured, torch.tensor(t), *ours_state, **args)
        theirs = reference.advance(measured, torch.tensor(t), *theirs_state, **args)
        same_state((*ours, *ours_state), (*theirs, *theirs_state))
        found.append(theirs[2])
    assert ours_state[0].isfinite().all()
    if filtered and 1 < window < 9 and channels > 1 and not huge:
        assert found[-1] and not found[1]


def check_gradient_step(channels, window, average, momentum, outlier):
    generator = torch.Generator().manual_seed(channels)
    ours_state = [torch.randn(channels, generator=generator),
                  torch.randn(window, channels, generator=generator) if average == 'am' else None]
    theirs_state = copy.deepcopy(ours_state)
    for t in range(5):
        g, s, var_hat = torch.randn(3, channels, generator=generator).abs()
        if average == 'am':
            g = g.clamp(max=3) * 1e38
        if t == 3:
            g[0] = float('inf')
        averaged = torch.tensor(t > 1 and not outlier)
        flag = None if outlier is None else torch.tensor(outlier)
        args = flag, averaged, s, var_hat
        options = dict(average=average, momentum=momentum, alpha=.9, eps=1e-5)
        ours = kernels.average_gradient(g, *ours_state, *args, **options)
        theirs = reference.average_gradient(g, *theirs_state, *args, **options)
        same_state((ours, *ours_state), (theirs, *theirs_state))


def check_steps():
    sizes = [(1, 1), (3, 4), (96, 4), (130, 1), (7, 9)]
    for (channels, window), average, filtered, per_channel in itertools.product(
            sizes, ('current', 'gm', 'am', 'ema', 'earlier_ema'), (False, True), (False, True)):
        check_step(channels, window, average, filtered, per_channel)
        check_step(channels, window, average, filtered, per_channel, huge=True)
    for (channels, window), average, momentum, outlier in itertools.product(
            sizes, ('current', 'am', 'nu'), (False, True), (None, False, True)):
        check_gradient_step(channels, window, average, momentum, outlier)


def check_all(shapes, dtypes):
    for case in itertools.product(shapes, dtypes, (False, True), (False, True)):
        try:
            check(*case)
        except AssertionError as error:
            sys.exit(f'{kernels._PROGRAMS} programs, {case}: {error}')


if __name__ == '__main__':
    check_all(SHAPES, DTYPES)
    check_empty()
    check_steps()
    kernels._PROGRAMS = 2
    check_all(LONG_SHAPES, [torch.float32])
    print('all cases agree')
