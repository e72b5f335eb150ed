"""UN's own averages in numpy, and what a training step on a CPU costs."""
import copy
import warnings

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mmunorm.norms import UN

from ..cases import build, sequence, train_step
from .averages_cases import SIZES, check_averages


@pytest.mark.parametrize('sizes', SIZES, ids=str)
@pytest.mark.parametrize('filtered', [False, True])
@pytest.mark.parametrize('centered', [False, True])
@pytest.mark.parametrize('huge', [False, True])
def test_every_step_is_that_of_plain_torch(sizes, filtered, centered, huge):
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'var.*degrees of freedom')  # of one channel and a window of 1
        check_averages(*sizes, filtered, centered, huge)


@pytest.mark.parametrize('tokens', [(), (23, )], ids=['', 'pad_mask'])
def test_a_training_is_that_of_plain_torch(tokens):
    norm = build('UN')
    plain = copy.deepcopy(norm)
    plain.has_own_kernels = False
    for _, x, dy in sequence(60, 6):
        mask = [torch.rand(size) < 0.3 for size in tokens]
        ours, theirs = (train_step(each, x, dy, *mask) for each in (norm, plain))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)
    assert norm.num_outliers > 0


@pytest.mark.parametrize('x', [torch.zeros(3, 6), torch.full((3, 6), float('nan')), torch.full((3, 6), 1e30)],
                         ids=['zero', 'nan', 'overflow'])
def test_numpy_does_not_warn(x):
    norm = UN(6, warmup_iters=0)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for _ in range(8):
            norm(x.clone().requires_grad_()).backward(x)


def test_calls_of_a_step():
    """A layer's time is that of its calls where it has few tokens: 210 of plain torch's operators, once."""
    norm, x = UN(16, warmup_iters=0), torch.randn(8, 16, requires_grad=True)
    for _ in range(8):
        norm(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as calls:
        torch.autograd.grad(norm(x), [x, *norm.parameters()], x.detach())
    assert sum(each.count for each in calls.key_averages() if each.key.startswith('aten::')) <= 60
