import copy
import io
from itertools import product

import numpy as np
import pytest
import torch
from mmengine.registry import MODELS
from torch.utils.checkpoint import checkpoint

from mmunorm.norms import UN, OfflineNorm, UN2d

from .cases import (
    NoSync,
    random_affine,
    sequence,
)
from .reference_un import ReferenceUN

SETTINGS = [
    dict(),
    dict(window=1),
    dict(window=2, alpha=0.6),
    dict(window=(3, 5), warmup_iters=7),
    dict(window=10, warmup_iters=0),
    dict(outlier_filter=False),
    dict(outlier_variance='channel'),
]

# Tables 5, 6, 7 and 10 of the paper, and what lies between.
ABLATIONS = [
    dict(forward_average=forward, backward_average=backward, backward_momentum=momentum,
         outlier_filter=outlier_filter)
    for forward, backward, momentum, outlier_filter in product(
        ('gm', 'am', 'ema', 'current'), ('am', 'current'), (True, False), (True, False))
]


@pytest.mark.parametrize('kwargs', SETTINGS, ids=str)
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32], ids=['float64', 'float32'])
def test_equals_step_by_step_reference(kwargs, dtype):
    channels = 6
    kwargs = dict(dict(warmup_iters=20), **kwargs)
    norm = random_affine(UN(channels, **kwargs)).to(dtype)
    window = norm.window
    reference = ReferenceUN(channels, window, norm.alpha, norm.warmup_iters, norm.outlier_filter,
                            norm.outlier_variance == 'channel')
    reference.gamma, reference.beta = (p.detach().double().numpy() for p in (norm.weight, norm.bias))
    tol = dict(rtol=1e-9, atol=1e-10) if dtype is torch.float64 else dict(rtol=2e-4, atol=2e-4)
    for _, x, dy in sequence(300, channels):
        tx = torch.from_numpy(x).to(dtype).requires_grad_()
        norm.zero_grad()
        y = norm(tx)
        y.backward(torch.from_numpy(dy).to(dtype))
        np.testing.assert_allclose(y.detach(), reference.forward(x), **tol)
        dx, dgamma, dbeta = reference.backward(dy)
        np.testing.assert_allclose(tx.grad, dx, **tol)
        np.testing.assert_allclose(norm.weight.grad, dgamma, **tol)
        np.testing.assert_allclose(norm.bias.grad, dbeta, **tol)
        np.testing.assert_allclose(norm.running_var, reference.running_var, **tol)
        np.testing.assert_allclose(norm.psi, reference.psi, **tol)
        assert not norm.outlier_filter or norm.num_outliers.item() == reference.num_outliers
    assert norm.num_batches_tracked.item() == 300
    if norm.outlier_filter and window[0] > 1:
        assert 0 < reference.num_outliers < 300
    else:
        assert reference.num_outliers == 0


@pytest.mark.parametrize('kwargs', [dict(), dict(window=(3, 5), outlier_filter=False), dict(forward_average='ema')],
                         ids=str)
@pytest.mark.parametrize('eta', [None, -0.25])
def test_a_mean_and_eta_equal_reference(kwargs, eta):
    channels, shift = 6, np.linspace(-3, 5, 6)
    kwargs = dict(warmup_iters=8, **kwargs)
    norm = random_affine(UN(channels, centered=True, eta=eta, **kwargs)).double()
    reference = ReferenceUN(channels, norm.window, centered=True, eta=eta,
                            **{key: value for key, value in kwargs.items() if key != 'window'})
    reference.gamma, reference.beta = (p.detach().numpy() for p in (norm.weight, norm.bias))
    rng = np.random.default_rng(0)
    for t, x, dy in sequence(120, channels):
        x = x + shift * (1 + 0.01 * t)
        padded = rng.random(len(x)) < 0.2
        tx = torch.from_numpy(x).requires_grad_()
        norm.zero_grad()
        y = norm(tx, torch.from_numpy(padded))
        y.backward(torch.from_numpy(dy))
        np.testing.assert_allclose(y.detach(), reference.forward(x, padded), rtol=1e-9, atol=1e-10)
        dx, dgamma, dbeta = reference.backward(dy)
        np.testing.assert_allclose(tx.grad, dx, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(norm.weight.grad, dgamma, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(norm.bias.grad, dbeta, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(norm.running_mean, reference.running_mean, rtol=1e-9)
        np.testing.assert_allclose(norm.running_var, reference.running_var, rtol=1e-9)
        assert not norm.outlier_filter or norm.num_outliers == reference.num_outliers
        if eta is not None:
            np.testing.assert_allclose(norm.eta.grad, [reference.deta], rtol=1e-9)
    assert not norm.outlier_filter or reference.num_outliers


@pytest.mark.parametrize('outlier_filter', [False, True])
def test_a_frozen_mean_is_un_of_x_minus_it(outlier_filter):
    channels = 6
    plain, frozen = (random_affine(UN(channels, warmup_iters=8, outlier_filter=outlier_filter, **kwargs)).double()
                     for kwargs in (dict(), dict(centered='frozen')))
    mean = torch.linspace(-3, 5, channels, dtype=torch.double)
    frozen.running_mean.copy_(mean)
    rng = np.random.default_rng(0)
    for _, x, dy in sequence(120, channels):
        padded = torch.from_numpy(rng.random(len(x)) < 0.2)
        x, dy = torch.from_numpy(x), torch.from_numpy(dy)
        a, b = (x - mean).requires_grad_(), x.clone().requires_grad_()
        for norm in (plain, frozen):
            norm.zero_grad()
        ya, yb = plain(a, padded), frozen(b, padded)
        ya.backward(dy)
        yb.backward(dy)
        torch.testing.assert_close(ya, yb)
        torch.testing.assert_close(a.grad, b.grad)
        torch.testing.assert_close(plain.weight.grad, frozen.weight.grad)
        torch.testing.assert_close(plain.running_var, frozen.running_var)
        torch.testing.assert_close(plain.psi, frozen.psi)
    assert torch.equal(frozen.running_mean, mean)
    assert not outlier_filter or plain.num_outliers == frozen.num_outliers > 0
    x = torch.randn(9, channels, dtype=torch.double)
    torch.testing.assert_close(plain.eval()(x - mean), frozen.eval()(x))


@pytest.mark.parametrize('kwargs', ABLATIONS, ids=lambda kwargs: '-'.join(map(str, kwargs.values())))
def test_ablations_equal_reference(kwargs):
    channels = 5
    norm = random_affine(UN(channels, window=(3, 4), alpha=0.8, warmup_iters=8, **kwargs)).double()
    reference = ReferenceUN(channels, (3, 4), 0.8, 8, **kwargs)
    reference.gamma, reference.beta = (p.detach().numpy() for p in (norm.weight, norm.bias))
    for _, x, dy in sequence(80, channels):
        tx = torch.from_numpy(x).requires_grad_()
        norm.zero_grad()
        y = norm(tx)
        y.backward(torch.from_numpy(dy))
        np.testing.assert_allclose(y.detach(), reference.forward(x), atol=1e-9)
        dx, dgamma, _ = reference.backward(dy)
        np.testing.assert_allclose(tx.grad, dx, atol=1e-9)
        np.testing.assert_allclose(norm.weight.grad, dgamma, atol=1e-9)
        np.testing.assert_allclose(norm.running_var, reference.running_var, atol=1e-9)
    if kwargs['outlier_filter']:
        assert norm.num_outliers.item() == reference.num_outliers > 0


def test_pad_mask_equals_reference():
    channels = 5
    norm = random_affine(UN(channels, warmup_iters=5, window=3)).double()
    reference = ReferenceUN(channels, (3, 3), warmup_iters=5)
    reference.gamma, reference.beta = (p.detach().numpy() for p in (norm.weight, norm.bias))
    rng = np.random.default_rng(3)
    for _, x, dy in sequence(60, channels, tokens=24):
        padded = rng.random(24) < 0.4
        x[padded] = rng.normal(size=(padded.sum(), channels)) * 100
        tx = torch.from_numpy(x).view(2, 12, channels).requires_grad_()
        norm.zero_grad()
        y = norm(tx, torch.from_numpy(padded).view(2, 12))
        y.backward(torch.from_numpy(dy).view(2, 12, channels))
        np.testing.assert_allclose(y.detach().view(24, -1), reference.forward(x, padded), atol=1e-9)
        dx, dgamma, _ = reference.backward(dy)
        np.testing.assert_allclose(tx.grad.view(24, -1), dx, atol=1e-9)
        np.testing.assert_allclose(norm.weight.grad, dgamma, atol=1e-9)
        np.testing.assert_allclose(norm.running_var, reference.running_var, atol=1e-9)
        np.testing.assert_allclose(norm.psi, reference.psi, atol=1e-9)


@pytest.mark.parametrize('masked', [False, True])
@pytest.mark.parametrize('kwargs', [dict(), dict(centered=True), dict(centered=True, eta=0.5), dict(centered='frozen')],
                         ids=str)
def test_gradcheck_in_warmup(masked, kwargs):
    norm = random_affine(UN(4, **kwargs)).double()
    if norm.centered == 'frozen':
        norm.running_mean.normal_()
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    mask = (torch.arange(10).view(2, 5) % 3 == 0) if masked else None

    names, parameters = zip(*norm.named_parameters(), strict=True)

    def step(x, *values):
        # Finite differences ask for the same step many times.
        fresh = {name: buffer.clone() for name, buffer in norm.named_buffers()}
        y = torch.func.functional_call(norm, fresh | dict(zip(names, values, strict=True)), (x, mask))
        return y if mask is None else y[~mask]  # a loss does not look at padding

    assert torch.autograd.gradcheck(step, (x, *parameters))


@pytest.mark.parametrize('shape', [(7, ), (3, 7), (2, 3, 7), (2, 3, 1, 7), (1, 1, 7)])
def test_any_leading_shape_is_tokens(shape):
    a, b = UN(7), UN(7)
    x = torch.randn(shape)
    torch.testing.assert_close(a(x), b(x.reshape(-1, 7)).view(shape))
    torch.testing.assert_close(a.running_var, b.running_var)


def test_non_contiguous_input():
    a, b = UN(6), UN(6)
    x = torch.randn(4, 6, 9).transpose(1, 2)
    torch.testing.assert_close(a(x), b(x.contiguous()))


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


def test_eval_is_equation_1_and_leaves_the_state():
    norm = random_affine(UN(8, warmup_iters=2)).double()
    for _, x, _ in sequence(30, 8):
        norm(torch.from_numpy(x))
    norm.eval()
    before = copy.deepcopy(norm.state_dict())
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    expected = norm.weight * x / torch.sqrt(norm.running_var + norm.eps) + norm.bias
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)
    scale, shift = norm.affine()
    assert scale.dtype == shift.dtype == torch.float64
    torch.testing.assert_close(x * scale + shift, expected, rtol=1e-12, atol=1e-12)
    for name, value in norm.state_dict().items():
        assert torch.equal(value, before[name]), name


def train_steps(norm, steps, start=0):
    """Outputs and gradients over `steps` of one fixed sequence."""
    out = []
    for t, x, dy in sequence(start + steps, norm.num_features):
        if t <= start:
            continue
        tx = torch.from_numpy(x).float().requires_grad_()
        norm.zero_grad()
        y = norm(tx)
        y.backward(torch.from_numpy(dy).float())
        out += [y.detach(), tx.grad, norm.weight.grad.clone()]
    return out


@pytest.mark.parametrize('stop', [3, 10, 27, 34])
def test_save_and_resume_in_the_middle_of_a_window_is_bit_equal(stop):
    """In warm-up, as it ends, in the middle of a window and on an outlier step."""
    norm = random_affine(UN(6, warmup_iters=10))
    train_steps(norm, stop)
    file = io.BytesIO()
    torch.save(norm.state_dict(), file)
    file.seek(0)
    resumed = UN(6, warmup_iters=10)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for a, b in zip(train_steps(norm, 40, stop), train_steps(resumed, 40, stop), strict=True):
        assert torch.equal(a, b)
    for name, value in norm.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert norm.num_outliers > 0


def test_ln_checkpoint_loads_its_affine_part():
    ln = torch.nn.LayerNorm(6)
    torch.nn.init.normal_(ln.weight)
    norm = UN(6)
    result = norm.load_state_dict(ln.state_dict(), strict=False)
    assert not result.unexpected_keys
    assert torch.equal(norm.weight, ln.weight)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_statistics_in_float32_under_amp(dtype):
    """Squares of 300 overflow fp16, and 1 + 2^-10 is lost in bf16: neither may reach the statistics."""
    norm, exact = UN(4), UN(4)
    x = (torch.rand(64, 4) + 300).to(dtype)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        y = norm(x)
    exact(x.float())
    assert y.dtype == dtype and norm.running_var.dtype == torch.float32
    torch.testing.assert_close(norm.running_var, exact.running_var, rtol=1e-6, atol=0)
    torch.testing.assert_close(y.float(), x.float() / x.float().square().mean(0).sqrt(), rtol=1e-2, atol=0)


def test_bf16_training_follows_float32():
    low, high = UN(6, warmup_iters=5), UN(6, warmup_iters=5)
    for _, x, dy in sequence(60, 6):
        x, dy = torch.from_numpy(x).bfloat16(), torch.from_numpy(dy).bfloat16()
        x1, x2 = x.clone().requires_grad_(), x.float().requires_grad_()
        y1, y2 = low(x1), high(x2)
        y1.backward(dy)
        y2.backward(dy.float())
        torch.testing.assert_close(y1.float(), y2, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(x1.grad.float(), x2.grad, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(low.psi, high.psi, rtol=1e-4, atol=1e-4)
    assert low.num_outliers == high.num_outliers > 0


def assert_finite_state(norm):
    for name, value in norm.state_dict().items():
        assert value.isfinite().all(), name


@pytest.mark.parametrize('bad', [float('nan'), float('inf'), 1e30])
@pytest.mark.parametrize('warmup_iters', [0, 1000])
def test_non_finite_activations_never_enter_the_state(bad, warmup_iters):
    norm = UN(6, warmup_iters=warmup_iters)
    for t, x, dy in sequence(30, 6):
        tx = torch.from_numpy(x).float()
        if t % 5 == 0:
            tx[3, 2] = bad
        tx.requires_grad_()
        norm(tx).backward(torch.from_numpy(dy).float())
        assert_finite_state(norm)
    norm.eval()
    assert norm(torch.randn(3, 6)).isfinite().all()


@pytest.mark.parametrize('warmup_iters', [0, 1000])
def test_non_finite_gradients_never_enter_the_state(warmup_iters):
    norm = UN(6, warmup_iters=warmup_iters)
    for t, x, dy in sequence(30, 6):
        tx, tdy = torch.from_numpy(x).float().requires_grad_(), torch.from_numpy(dy).float()
        if t % 5 == 0:
            tdy[3, 2] = float('inf')
        norm.zero_grad()
        norm(tx).backward(tdy)
        assert_finite_state(norm)
        # The overflow must stay visible to a gradient scaler.
        assert norm.weight.grad.isfinite().all() == (t % 5 != 0)


@pytest.mark.parametrize('warmup_iters', [0, 1000])
def test_only_padding_records_what_was_known(warmup_iters):
    norm = UN(4, warmup_iters=warmup_iters)
    x = torch.randn(2, 3, 4, requires_grad=True)
    for _ in range(6):
        norm(x).sum().backward()
    running_var, psi = norm.running_var.clone(), norm.psi.clone()
    gradients = norm.gradient_record.clone()
    y = norm(x * 1e3, torch.ones(2, 3, dtype=torch.bool))
    y.sum().backward()
    assert y.isfinite().all()
    assert torch.equal(norm.activation_record[-1], running_var)
    assert torch.equal(norm.gradient_record, gradients) and torch.equal(norm.psi, psi)
    assert_finite_state(norm)


def test_no_tokens():
    norm = UN(4)
    x = torch.randn(0, 4, requires_grad=True)
    y = norm(x)
    y.sum().backward()
    assert y.shape == (0, 4) and x.grad.shape == (0, 4)
    assert norm.num_batches_tracked == 0


@pytest.mark.parametrize('masked', [False, True])
def test_no_host_synchronisation(masked):
    norm = UN(4, warmup_iters=3)
    with pytest.raises(AssertionError), NoSync():
        bool(norm.num_outliers > 0)
    mask = torch.rand(2, 5) > 0.8 if masked else None
    with NoSync():
        for _ in range(10):
            norm(torch.randn(2, 5, 4, requires_grad=True), mask).square().sum().backward()
    assert norm.num_batches_tracked == 10


@pytest.mark.parametrize('use_reentrant', [False, True])
def test_a_recomputed_forward_is_the_same_step(use_reentrant):
    """Activation checkpointing: same outputs, gradients and state, each step recorded once."""
    plain, recomputed = random_affine(UN(6, warmup_iters=5)), random_affine(UN(6, warmup_iters=5))
    for _, x, dy in sequence(40, 6):
        results = []
        for norm, run in ((plain, plain), (recomputed, lambda x: checkpoint(
                lambda v: recomputed(v) * 1, x, use_reentrant=use_reentrant))):
            tx = torch.from_numpy(x).float().requires_grad_()
            norm.zero_grad()
            y = run(tx)
            y.backward(torch.from_numpy(dy).float())
            results.append((y.detach(), tx.grad, norm.weight.grad))
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, recomputed.state_dict()[name]), name


def test_gradient_accumulation_counts_every_forward():
    norm = UN(4, warmup_iters=0)
    for _ in range(3):
        norm(torch.randn(5, 4)).sum().backward()
    assert norm.num_batches_tracked == 3


def test_restart_warmup_forgets_the_task_and_keeps_the_statistics():
    norm = random_affine(UN(6, warmup_iters=3))
    train_steps(norm, 40)
    kept = {name: getattr(norm, name).clone() for name in ('weight', 'bias', 'running_var')}
    norm.restart_warmup()
    fresh = UN(6).state_dict()
    for name, value in norm.state_dict().items():
        assert torch.equal(value, kept.get(name, fresh[name])), name


def test_deepcopy_after_a_step():
    norm = UN(4)
    norm(torch.randn(5, 4)).sum().backward()
    assert torch.equal(copy.deepcopy(norm).running_var, norm.running_var)


@pytest.mark.parametrize('scope', ['mmdet', 'mmpretrain', 'mmengine'])
@pytest.mark.parametrize('name,cls', [('UN', UN), ('UN2d', UN2d)])
def test_registered_for_every_scope(scope, name, cls):
    import mmunorm  # noqa: F401
    with MODELS.switch_scope_and_registry(scope) as registry:
        norm = registry.build(dict(type=name, num_features=4, window=2))
    assert type(norm) is cls and norm.window == (2, 2) and isinstance(norm, OfflineNorm)


def test_both_norm_builders():
    from mmcv.cnn import build_norm_layer as build_mmcv
    from mmpretrain.models.utils import build_norm_layer as build_mmpretrain
    cfg = dict(type='UN', window=[2, 3], eps=1e-6, requires_grad=False)
    name, norm = build_mmcv(cfg, 8, postfix=1)
    assert name == 'ln1'
    for n in (norm, build_mmpretrain(cfg, 8)):
        assert (n.window, n.eps, n.weight.requires_grad) == ((2, 3), 1e-6, False)


@pytest.mark.parametrize('kwargs,words', [
    (dict(num_features=0), ('num_features', '0')),
    (dict(num_features=2.5), ('num_features', '2.5')),
    (dict(num_features=8, window=0), ('window', '0')),
    (dict(num_features=8, window=True), ('window', 'True')),
    (dict(num_features=8, window=(1, 2, 3)), ('window', r'\(1, 2, 3\)')),
    (dict(num_features=8, window='4'), ('window', "'4'")),
    (dict(num_features=8, window=(4, 0)), ('window', '0')),
    (dict(num_features=8, alpha=1.0), ('alpha', '1.0')),
    (dict(num_features=8, alpha=-0.1), ('alpha', '-0.1')),
    (dict(num_features=8, warmup_iters=-1), ('warmup_iters', '-1')),
    (dict(num_features=8, warmup_iters=1.0), ('warmup_iters', 'share', '1.0')),
    (dict(num_features=8, warmup_iters=True), ('warmup_iters', 'True')),
    (dict(num_features=8, eps=0), ('eps', '0')),
    (dict(num_features=8, outlier_variance='layers'), ('outlier_variance', "'layers'")),
])
def test_bad_arguments(kwargs, words):
    with pytest.raises(ValueError, match='.*'.join(words)):
        UN(**kwargs)


def test_bad_inputs():
    norm = UN(8)
    with pytest.raises(ValueError, match=r'num_features=8.*\(2, 3\)'):
        norm(torch.randn(2, 3))
    with pytest.raises(ValueError, match=r'\(\)'):
        norm(torch.tensor(1.))
    with pytest.raises(TypeError, match='int64'):
        norm(torch.ones(2, 8, dtype=torch.long))
    with pytest.raises(ValueError, match=r'pad_mask.*\(2, 3\).*\(3, 2\)'):
        norm(torch.randn(2, 3, 8), torch.zeros(3, 2, dtype=torch.bool))
    with pytest.raises(TypeError, match='pad_mask.*float32'):
        norm(torch.randn(2, 3, 8), torch.zeros(2, 3))
    assert norm.num_batches_tracked == 0


@pytest.mark.parametrize('trained, tested', [(True, 'frozen'), ('frozen', True)])
def test_with_a_frozen_mean_and_with_one_of_its_own_it_is_the_same_at_inference(trained, tested):
    norm = UN(4, centered=trained, eta=0.3, warmup_iters=0)
    with torch.no_grad():
        norm.running_mean.normal_()
    for _ in range(6):
        norm(torch.randn(9, 4) + 1)
    other = UN(4, centered=tested, eta=0.)
    other.load_state_dict(norm.state_dict())
    x = torch.randn(9, 4)
    assert torch.equal(other.eval()(x), norm.eval()(x))


def test_a_share_of_a_run_of_unknown_length_is_refused_before_the_first_step():
    norm = UN(4, warmup_iters=0.5)
    norm.eval()(torch.ones(3, 4))
    with pytest.raises(RuntimeError, match='warmup_iters=0.5 is a share .*set_progress'):
        norm.train()(torch.ones(3, 4))
    assert norm.num_batches_tracked == 0


@pytest.mark.parametrize('calls', [1, 5])
def test_a_share_counts_steps_of_the_run_and_not_calls(calls):
    """A layer that runs five times a step has the same warm-up as one that runs once."""
    norm = UN(4, window=2, warmup_iters=0.3, outlier_filter=False)
    assert norm.start_run(resumed=False, steps=30) == ''
    averaged = []
    for done in range(30):
        norm.set_progress(done, 30)
        for _ in range(calls):
            x = torch.randn(9, 4)
            y = norm(x)
        averaged.append(not torch.allclose(y, x * (x.square().mean(0) + norm.eps).rsqrt()))
    assert averaged == [False] * 9 + [True] * 21
    assert norm.num_batches_tracked == 30 * calls
