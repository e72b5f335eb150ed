import copy
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from mmunorm.norms import MABN, PN, UN, OfflineNorm, TokenBN, kernels
from mmunorm.norms.averages import arithmetic_mean, finite_or, geometric_mean, push, root_variance
from mmunorm.norms.kernels import cpu, native, reference

ROOT = Path(__file__).parents[3]

needs_library = pytest.mark.skipif(native.library() is None, reason='it was installed without a C compiler')

SHAPES = [(1, 1), (7, ), (3, 5, 7), (2, 49, 96), (16, 784, 24), (2999, 96), (5, 2000), (131, 33)]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def double(*tensors):
    return [None if tensor is None else tensor.double() for tensor in tensors]


def assert_close(ours, theirs, size=1.):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == torch.float32
            torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=2e-6 * size)


@needs_library
@pytest.mark.parametrize('shape', SHAPES, ids=str)
@pytest.mark.parametrize('centered', [False, True])
@pytest.mark.parametrize('threads', [1, 2, 5])
def test_equals_the_reference_in_float64(shape, centered, threads, monkeypatch):
    monkeypatch.setattr(torch, 'get_num_threads', lambda: threads)
    c = shape[-1]
    x, dy = draw(*shape) * 2 + 1, draw(*shape, seed=1)
    weight, rstd, psi, g_mean, mean = (draw(c, seed=seed) for seed in range(2, 7))
    eta = draw(1, seed=8) if centered else None
    mean, g_mean = (mean, g_mean) if centered else (None, None)
    assert_close([native.second_moment(x)], [reference.second_moment(x.double())])
    assert_close(native.variance_and_mean(x), reference.variance_and_mean(x.double()))
    size = float((dy.abs() * (x.abs() + 2)).sum())  # of what cancels
    args = dy, x, weight, rstd, mean
    theirs = reference.normalize_backward(*double(*args))
    assert_close(native.normalize_backward(*args), theirs, size / c ** .5)
    args = dy, x, weight, rstd, psi, mean, g_mean, eta
    theirs = reference.normalize_input_gradient(*double(*args))
    assert_close([native.normalize_input_gradient(*args)], [theirs], size=10)
    with torch.no_grad():
        assert_close([native.normalize_forward(x, weight, rstd)],
                     [reference.normalize_forward(*double(x, weight, rstd))])


@needs_library
def test_the_same_input_gives_the_same_bits():
    x, dy, c = draw(5000, 33), draw(5000, 33, seed=1), draw(33, seed=2)
    for _ in range(5):
        assert torch.equal(native.second_moment(x), native.second_moment(x.clone()))
        twice = (native.normalize_backward(dy, x, c, c) for _ in range(2))
        for a, b in zip(*twice, strict=True):
            assert a is b is None or torch.equal(a, b)


NUMBERS = st.sampled_from([0., 1., 1e-30, 3e38, 0.25, 4.]) | st.floats(0, 10, width=32)
MEASURED = NUMBERS | st.sampled_from([float('inf'), float('nan')])
ALPHAS = st.sampled_from([0., 0.5, 0.9])
GRADIENTS = st.sampled_from([0., float('inf'), float('nan'), -1e30]) | st.floats(-10, 10, width=32)


@needs_library
@pytest.mark.filterwarnings('ignore:var\\(\\)')  # of one number
@settings(deadline=None, max_examples=300)
@given(data=st.data(), channels=st.integers(1, 9), window=st.integers(1, 9),
       average=st.sampled_from(['current', 'gm', 'am', 'ema', 'earlier_ema']), filtered=st.booleans(),
       per_channel=st.booleans(), alpha=ALPHAS, t=st.integers(1, 5))
def test_a_step_forward_equals_the_reference(data, channels, window, average, filtered, per_channel, alpha,
                                             t):
    records = filtered or average in ('gm', 'am')
    state = [numbers(data, channels), numbers(data, window, channels) if records else None,
             torch.tensor(3) if filtered else None]
    measured, step = numbers(data, channels, of=MEASURED), torch.tensor(t)
    config = dict(average=average, per_channel=per_channel, unsettled=2, alpha=alpha)
    theirs_state = [tensor if tensor is None or not tensor.is_floating_point() else tensor.double()
                    for tensor in copy.deepcopy(state)]
    if filtered:
        assume(not is_close_call(measured, *state, per_channel))
    theirs = reference.advance(measured.double(), step, *theirs_state, **config)
    ours = native.advance(measured, step, *state, **config)
    assert_same((*ours, *state), (*theirs, *theirs_state))


@needs_library
@settings(deadline=None, max_examples=300)
@given(data=st.data(), channels=st.integers(1, 9), window=st.integers(1, 9),
       average=st.sampled_from(['current', 'am', 'nu']), momentum=st.booleans(),
       outlier=st.sampled_from([None, False, True]), settled=st.booleans(), alpha=ALPHAS)
def test_a_step_backward_equals_the_reference(data, channels, window, average, momentum, outlier, settled,
                                              alpha):
    finite = st.floats(-10, 10, width=32)
    psi = numbers(data, channels, of=finite)
    record = numbers(data, window, channels, of=finite) if average == 'am' else None
    g = numbers(data, channels, of=GRADIENTS)
    s, var_hat = (numbers(data, channels, of=st.floats(0, 10, width=32)) for _ in range(2))
    averaged = torch.tensor(settled and not outlier)
    outlier = None if outlier is None else torch.tensor(outlier)
    config = dict(average=average, momentum=momentum, alpha=alpha, eps=1e-5)
    theirs_state = double(psi, record)
    theirs = reference.average_gradient(g.double(), *theirs_state, outlier, averaged, *double(s, var_hat),
                                        **config)
    ours = native.average_gradient(g, psi, record, outlier, averaged, s, var_hat, **config)
    assert_same((ours, psi, record), (theirs, *theirs_state))


def is_close_call(measured, running_var, record, _, per_channel):
    """Whether an outlier is one by a difference that rounding to float32 may hide."""
    before = record.double()
    after = push(before, finite_or(measured, running_var).double())
    am = arithmetic_mean(after)
    by = (am - geometric_mean(after) - len(before) * root_variance(before, per_channel)) / am
    return bool(((by > 1e-12) & (by < 1e-5)).any())


def numbers(data, *shape, of=NUMBERS):
    count = torch.Size(shape).numel()
    return torch.tensor(data.draw(st.lists(of, min_size=count, max_size=count))).view(shape)


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and a.is_floating_point():
            size = float(b.abs().max())
            torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-6 * min(size, 1))
        elif a is not None:
            assert a.dtype == b.dtype and torch.equal(a, b)


@needs_library
def test_trains_like_the_operators_of_torch(monkeypatch):
    """UN and TokenBN, over steps with an outlier, NaN and a half-precision step between."""
    for norm in (UN(16, warmup_iters=2), TokenBN(16)):
        other = copy.deepcopy(norm)
        for step in range(12):
            x = draw(4, 30, 16, seed=step) * (50 if step == 8 else 1)
            x[0, 0, 0] = float('nan') if step == 9 else 1
            x = x.bfloat16() if step == 10 else x
            results = []
            for own, library in ((norm, native.library), (other, lambda: None)):
                with monkeypatch.context() as patch:
                    patch.setattr(native, 'library', library)
                    leaf = x.clone().requires_grad_()
                    y = own(leaf)
                    y.backward(draw(*x.shape, seed=99).to(y.dtype))
                results.append([y.detach(), leaf.grad, *(p.grad for p in own.parameters())])
            for a, b in zip(*results, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)
        torch.testing.assert_close(norm.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-6)


NORMS = {
    'UN': lambda: UN(16, warmup_iters=2),
    'UN without filter': lambda: UN(16, warmup_iters=2, outlier_filter=False, window=(3, 5)),
    'UN of the current step': lambda: UN(16, warmup_iters=0, outlier_filter=False, forward_average='current',
                                         backward_average='current', backward_momentum=False),
    'MABN': lambda: MABN(16, window=3, warmup_iters=2),
    'PN': lambda: PN(16, warmup_iters=2),
    'PN*': lambda: PN(16, layer_scale=False, warmup_iters=2),
}


@needs_library
@pytest.mark.parametrize('name', NORMS)
@pytest.mark.parametrize('loss_scale', [None, torch.tensor(8.)], ids=['', 'scaled'])
def test_a_whole_step_is_its_parts(name, loss_scale, monkeypatch):
    """To the last bit, so that a recomputed forward pass, which goes by parts, gives the same."""
    whole = NORMS[name]()
    whole.weight.data.copy_(draw(16))
    whole.loss_scale = loss_scale
    parts, calls = copy.deepcopy(whole), []
    monkeypatch.setattr(native, 'step_forward', noting(calls, native.step_forward))
    monkeypatch.setattr(native, 'step_backward', noting(calls, native.step_backward))
    for step in range(12):
        x = draw(4, 30, 16, seed=step) * (50 if step == 8 else 1)
        x[0, 0, 0] = float('nan') if step == 9 else 1
        dy = draw(4, 30, 16, seed=99 + step)
        dy[0, 0, 1] = float('inf') if step == 10 else 1
        results = []
        for norm, takes in ((whole, kernels.takes_whole_steps), (parts, lambda *args: False)):
            with monkeypatch.context() as patch:
                patch.setattr(kernels, 'takes_whole_steps', takes)
                leaf = x.clone().requires_grad_()
                y = norm(leaf)
                y.backward(dy)
            results.append([y.detach(), leaf.grad, *(p.grad for p in norm.parameters())])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(whole.state_dict(), parts.state_dict(), rtol=0, atol=0)
        # PN with layer_scale does not show its steps.
        steps = (norm._pending.newest for norm in (whole, parts))
        for a, b in zip(*steps, strict=True):
            assert (a is None) == (b is None)
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    backward = loss_scale is None and hasattr(whole, 'psi')
    assert calls.count('step_forward') == 12 and calls.count('step_backward') == 12 * backward


def noting(calls, function):
    def noted(*args, **kwargs):
        calls.append(function.__name__)
        return function(*args, **kwargs)
    return noted


@needs_library
def test_a_whole_step_without_the_gradient_of_its_input():
    norm, x = UN(8, warmup_iters=0), draw(5, 8)
    other = copy.deepcopy(norm)
    norm(x).sum().backward()
    other(x.requires_grad_()).sum().backward()
    torch.testing.assert_close(norm.weight.grad, other.weight.grad, rtol=0, atol=0)
    torch.testing.assert_close(norm.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize('change', [
    lambda norm: setattr(norm, 'psi', torch.zeros(3)),
    lambda norm: setattr(norm, 'gradient_record', torch.zeros(4, 3)),
    lambda norm: setattr(norm.weight, 'data', torch.zeros(3))
], ids=['psi', 'record', 'weight'])
def test_a_norm_that_changes_before_its_backward_pass_is_an_error(change):
    """Not a read or write behind the end of a tensor."""
    norm, x = UN(8, warmup_iters=0), draw(5, 8).requires_grad_()
    y = norm(x)
    change(norm)
    with pytest.raises(RuntimeError):
        y.sum().backward()


@needs_library
def test_hooks_may_change_what_is_saved():
    """Another layout is the same tensor, another dtype an error, not a read or write behind its end."""
    norm, x = UN(8, warmup_iters=0), draw(2000, 8).requires_grad_()
    other, leaf = copy.deepcopy(norm), x.detach().clone().requires_grad_()
    norm(x).square().sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.t().contiguous() if t.dim() == 2 else t,
                                                  lambda t: t.t() if t.dim() == 2 else t):
        y = other(leaf)
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, leaf.grad)
    torch.testing.assert_close(norm.weight.grad, other.weight.grad, rtol=1e-4, atol=1e-3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half() if t.dim() == 2 else t, lambda t: t):
        y = norm(x)
    with pytest.raises(RuntimeError, match='Half'):
        y.square().sum().backward()


@needs_library
def test_a_gradient_without_memory():
    norm, x = UN(8, warmup_iters=0), draw(2000, 8).requires_grad_()
    norm(x).backward(torch._efficientzerotensor(2000, 8))
    assert not x.grad.any()


@needs_library
def test_a_whole_step_leaves_eta_to_the_parts():
    class Norm(OfflineNorm):
        def __init__(self):
            super().__init__(8)
            self.eta = torch.nn.Parameter(torch.ones(1))

    norm, x = Norm(), draw(5, 8)
    y = norm(x)
    y.sum().backward()
    torch.testing.assert_close(y, x + x / (x.square().mean(0) + 1e-5).sqrt())
    assert norm.eta.grad == pytest.approx(x.sum().item(), abs=1e-4)


def test_an_eager_step_has_a_compiled_backward_pass():
    norm, x = UN(8, warmup_iters=0), draw(5, 8).requires_grad_()
    other, leaf = copy.deepcopy(norm), x.detach().clone().requires_grad_()
    norm(x).square().sum().backward()
    y = other(leaf).square().sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend='eager', fullgraph=True)):
        y.backward()
    torch.testing.assert_close(x.grad, leaf.grad)
    torch.testing.assert_close(norm.state_dict(), other.state_dict())


@needs_library
def test_a_norm_that_becomes_half_precision_before_its_backward_pass(monkeypatch):
    norm, x, calls = UN(8, warmup_iters=0), draw(5, 8).requires_grad_(), []
    monkeypatch.setattr(native, 'step_backward', noting(calls, native.step_backward))
    y = norm(x)
    norm.half()
    y.sum().backward()
    assert not calls and x.grad.isfinite().all()


@needs_library
@pytest.mark.parametrize('default', [torch.float64, torch.device('meta')], ids=str)
def test_defaults_of_torch_do_not_reach_the_library(default):
    norm, x, dy = UN(8, warmup_iters=0), draw(5, 8), draw(5, 8, seed=1)
    other = copy.deepcopy(norm)
    leaf = x.clone().requires_grad_()
    expected = norm(leaf)
    expected.backward(dy)
    set_default = torch.set_default_dtype if default == torch.float64 else torch.set_default_device
    set_default(default)
    try:
        y = other(x.requires_grad_())
        y.backward(dy)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert torch.equal(y, expected) and torch.equal(x.grad, leaf.grad)
    torch.testing.assert_close(other.state_dict(), norm.state_dict(), rtol=0, atol=0)


@needs_library
def test_takes_only_what_it_can_read():
    x = draw(4, 6)
    assert native.takes(x, None, torch.nn.Parameter(x))
    for other in (x.double(), x.bfloat16(), x.t(), x.to('meta'), torch.nn.Buffer(x).as_subclass(Tagged)):
        assert not native.takes(x, other)


class Tagged(torch.Tensor):
    pass


@needs_library
def test_a_changed_state_is_seen_by_autograd():
    """Which refuses to differentiate with a tensor that has changed since."""
    norm = UN(4, warmup_iters=0)
    state = (norm.running_var, norm.activation_record, norm.num_outliers, norm.psi, norm.gradient_record)
    before = [tensor._version for tensor in state]
    norm(draw(5, 4).requires_grad_()).sum().backward()
    assert all(tensor._version > version for tensor, version in zip(state, before, strict=True))


@needs_library
def test_is_what_the_dispatcher_takes():
    x, c, t = draw(4, 6), draw(6), torch.tensor(1)
    assert kernels._kernels(x) is native
    assert kernels._step_kernels(c, (c, None), draw(3, 6), (t, None)) is native
    for arguments in (((c[:5], ), None), ((c, ), draw(3, 5)), ((c, ), None, (t.int(), )),
                      ((c, ), None, (torch.empty(0, dtype=torch.long), )), ((c.double(), ), None)):
        assert kernels._step_kernels(c, *arguments) is reference
    state = dict(weight=c, bias=c, running_var=c, record=draw(3, 6), num_outliers=t, num_batches_tracked=t)
    assert kernels.takes_whole_steps(x, **state)
    for changed in (dict(weight=c[:5]), dict(bias=c[None]), dict(running_var=c.double()),
                    dict(record=draw(3, 5)), dict(num_outliers=t.int()),
                    dict(num_batches_tracked=torch.empty(0, dtype=torch.long))):
        assert not kernels.takes_whole_steps(x, **{**state, **changed})
    assert not kernels.takes_whole_steps(x[:0], **state)


def test_state_of_another_size_is_an_error():
    """Not a write behind its end."""
    norm = UN(8, warmup_iters=0)
    norm.psi = torch.zeros(4)
    with pytest.raises(RuntimeError, match='size of tensor'):
        norm(draw(5, 8).requires_grad_()).sum().backward()


@pytest.mark.parametrize('transform', [
    lambda norm, x: torch.func.functionalize(norm)(x),
    lambda norm, x: make_fx(norm)(x)(x + 1) - norm(x + 1) + norm(x),
    lambda norm, x: torch.vmap(norm)(x),
    lambda norm, x: torch.func.jvp(norm, (x, ), (x, ))[0],
    lambda norm, x: torch.jit.trace(norm, x)(x + 1) - norm(x + 1) + norm(x),
    lambda norm, x: norm(torch._neg_view(-x))
], ids=['functionalize', 'make_fx', 'vmap', 'jvp', 'trace', 'neg'])
def test_transformed_calls_see_operators_of_torch(transform):
    norm, x = UN(8).eval(), draw(5, 8)
    expected = norm(x).detach()
    with torch.no_grad():
        torch.testing.assert_close(transform(norm, x), expected)


def test_forward_mode_derivatives():
    norm, x = UN(8).eval(), draw(5, 8)
    with torch.no_grad(), forward_ad.dual_level():
        y = norm(forward_ad.make_dual(x, torch.ones_like(x)))
        tangent = forward_ad.unpack_dual(y).tangent
        torch.testing.assert_close(tangent, norm.affine()[0].float().expand(5, 8))


@needs_library
def test_goes_without_a_library_of_another_source(monkeypatch):
    native.library.cache_clear()
    monkeypatch.setattr(native, '_SOURCE', Path(__file__))
    with pytest.warns(UserWarning, match='install the package again'):
        assert native.library() is None
    with monkeypatch.context() as patch:
        patch.setattr(native, 'library', lambda: None)
        assert kernels._kernels(draw(3, 3)) is cpu
        assert kernels._step_kernels(draw(3), (), None) is reference
    native.library.cache_clear()


def test_the_compiler_has_no_complaint(tmp_path):
    source, target = ROOT / 'mmunorm/norms/kernels/native.c', tmp_path / 'native.so'
    command = ['gcc', '-std=gnu11', '-O3', '-fopenmp', '-DSOURCE=1u', '-Wall', '-Wextra', '-Werror',
               '-shared', '-fPIC', '-o', str(target), str(source), '-lm']
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip('no gcc')
    assert result.returncode == 0, result.stderr
