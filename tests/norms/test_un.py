"""UN in every setting against its numpy reference, and its own guarantees."""
import numpy as np
import pytest
import torch

from mmunorm.norms import PN, UN, UN2d

from .cases import assert_equals_reference, random_affine, train_steps, un

SETTINGS = [
    dict(),
    dict(window=1),
    dict(window=2, alpha=0.6),
    dict(window=5, warmup_iters=7),
    dict(window=10, warmup_iters=0),
    dict(outlier_filter=False),
    dict(centered=True),
    dict(centered=True, eta=-0.25, window=3, outlier_filter=False),
    dict(centered='frozen'),
    # Of Tables 5, 6, 7 and 10 of the paper, and between them.
    dict(forward_average='current', backward_momentum=False),
    dict(forward_average='current', backward_average='current', backward_momentum=False, outlier_filter=False),
    dict(backward_average='current', outlier_filter=False),
    dict(backward_average='current', backward_momentum=False),
]


@pytest.mark.parametrize('kwargs', SETTINGS, ids=str)
def test_equals_step_by_step_reference(kwargs):
    """The tests of all norms have a pad mask."""
    norm = random_affine(UN(6, **{'warmup_iters': 20, **kwargs})).double()
    shift = np.linspace(-3, 5, 6) * bool(norm.centered)
    if norm.centered:
        norm.running_mean.copy_(torch.from_numpy(shift))
    reference = assert_equals_reference(norm, un, 60, False, rtol=1e-9, atol=1e-9, shift=shift)
    if norm.outlier_filter and norm.window > 1:
        assert reference.num_outliers > 0


@pytest.mark.parametrize('masked', [False, True])
@pytest.mark.parametrize('kwargs', [dict(), dict(centered=True, eta=0.5), dict(centered='frozen')], ids=str)
def test_gradcheck_in_warmup(masked, kwargs):
    norm = random_affine(UN(4, **kwargs)).double()
    if norm.centered == 'frozen':
        norm.running_mean.normal_()
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    mask = (torch.arange(10).view(2, 5) % 3 == 0) if masked else None
    names, parameters = zip(*norm.named_parameters(), strict=True)

    def step(x, *values):
        # Finite differences evaluate the same step many times.
        fresh = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        y = torch.func.functional_call(norm, fresh | dict(zip(names, values, strict=True)), (x, mask))
        return y if mask is None else y[~mask]  # a loss ignores padding

    assert torch.autograd.gradcheck(step, (x, *parameters))


def test_un2d_is_un_over_positions():
    a, b = random_affine(UN2d(5)), random_affine(UN(5))
    x = torch.randn(2, 5, 3, 4, requires_grad=True)
    x2 = x.detach().permute(0, 2, 3, 1).contiguous().requires_grad_()
    mask = torch.rand(2, 3, 4) > 0.7
    y, y2 = a(x, mask), b(x2, mask)
    torch.testing.assert_close(y, y2.permute(0, 3, 1, 2))
    y.pow(3).sum().backward()
    y2.pow(3).sum().backward()
    torch.testing.assert_close(x.grad, x2.grad.permute(0, 3, 1, 2))
    with pytest.raises(ValueError, match=r'\(N, C, H, W\)'):
        a(torch.randn(2, 3, 5))


def test_restart_warmup_forgets_the_task_and_keeps_the_statistics():
    norm = random_affine(UN(6, warmup_iters=3))
    train_steps(norm, 40)
    kept = {name: getattr(norm, name).clone() for name in ('weight', 'bias', 'running_var')}
    norm.restart_warmup()
    fresh = UN(6).state_dict()
    for name, value in norm.state_dict().items():
        assert torch.equal(value, kept.get(name, fresh[name])), name


def test_a_share_of_a_run_of_unknown_length_is_refused_before_the_first_step():
    norm = UN(4, warmup_iters=0.5)
    norm.eval()(torch.ones(3, 4))
    with pytest.raises(RuntimeError, match='warmup_iters=0.5 is a share .*set_progress'):
        norm.train()(torch.ones(3, 4))
    assert norm.num_batches_tracked == 0


@pytest.mark.parametrize('norm, steps', [(UN(4, window=3, warmup_iters=0.5), 3), (PN(4, warmup_iters=0.5), 0)])
def test_a_share_of_a_run_ends_with_full_records(norm, steps):
    norm.set_progress(4, 10)
    assert norm.exact_steps > 10
    norm.set_progress(5, 10)
    assert norm.exact_steps == steps
