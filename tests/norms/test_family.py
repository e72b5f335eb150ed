"""Every norm against its paper's equations, and the guarantees of all norms."""

import copy
import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmengine.registry import MODELS
from torch import nn
from torch.utils.checkpoint import checkpoint

from mmunorm.norms import MABN, PN, RMSN, UN, DyT, NoNorm, Norm, OfflineNorm, RepBN, TokenBN

from ..versions import compiles_as_one_graph
from .cases import (
    NORMS,
    OFFLINE,
    NoSync,
    assert_equals_reference,
    assert_finite_state,
    assert_same_state,
    build,
    every_norm,
    every_offline_norm,
    sequence,
    train_step,
    train_steps,
)


@every_norm
@pytest.mark.parametrize('dtype, masked', [(torch.float64, False), (torch.float64, True), (torch.float32, False)])
def test_equals_its_papers_equations(name, dtype, masked):
    tol = (1e-8, 1e-9) if dtype is torch.float64 else (1e-3, 1e-3)
    assert_equals_reference(build(name).to(dtype), NORMS[name].reference, 40, masked, *tol)


def test_token_bn_of_a_small_variance_and_a_large_mean():
    offset = 1e4
    x, dy = torch.randn(2, 4096, 4, generator=torch.Generator().manual_seed(0))
    x += offset
    norm, exact = TokenBN(4), TokenBN(4).double()
    y, dx, dweight, _ = (value.double() for value in train_step(norm, x, dy))
    exact_y, exact_dx, exact_dweight, _ = train_step(exact, x.double(), dy.double())
    torch.testing.assert_close(norm.running_var.double(), exact.running_var, rtol=1e-5, atol=0)
    torch.testing.assert_close((y, dx), (exact_y, exact_dx), rtol=0, atol=offset * 1e-6)
    torch.testing.assert_close(dweight, exact_dweight, rtol=1e-3, atol=offset * 1e-4)


@given(st.integers(1, 40), st.integers(1, 9), st.floats(-50, 50), st.floats(0.01, 10), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_token_bn_equals_torch_on_any_input(tokens, channels, offset, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, tokens + 1, channels, dtype=torch.float64, generator=generator)
    x = x * scale + offset
    results = [(train_step(norm, x, dy), norm.eval()(x), norm.state_dict()) for norm in (
        TokenBN(channels, alpha=0.6).double(), nn.BatchNorm1d(channels, momentum=0.4).double())]
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@every_norm
def test_names_in_the_state(name):
    assert set(build(name).state_dict()) == NORMS[name].state


@every_norm
@pytest.mark.parametrize('shape', [(2, 3, 4, 6), (1, 1, 6), (6, )], ids=str)
def test_any_leading_shape_is_tokens(name, shape):
    a, b = build(name), build(name)
    x = torch.randn(*shape, 2)[..., 0]  # strided
    for _ in range(8):
        torch.testing.assert_close(a(x), b(x.reshape(-1, 6)).view(shape))
    torch.testing.assert_close(a.state_dict(), b.state_dict())
    assert_finite_state(a)


@every_norm
def test_no_tokens(name):
    norm = build(name)
    before = copy.deepcopy(norm)
    x = torch.randn(2, 0, 6, requires_grad=True)
    y = norm(x, torch.zeros(2, 0, dtype=torch.bool))
    y.sum().backward()
    assert y.shape == x.grad.shape == (2, 0, 6)
    assert_same_state(norm, before)


@pytest.mark.parametrize('name', [name for name in NORMS if not build(name).fold_obstacle])
def test_affine_is_the_norm_at_inference(name):
    norm = build(name).double()
    for _, x, dy in sequence(30, 6):
        norm(torch.from_numpy(x).requires_grad_()).backward(torch.from_numpy(dy))
    before = copy.deepcopy(norm.eval())
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    y = norm(x)
    y.sum().backward()  # `norm_eval` and `frozen_stages` freeze norms inside of a model that trains
    if name in OFFLINE:
        mean = 0 if norm.running_mean is None else norm.running_mean
        expected = norm.weight * (x - mean) / (norm.running_var + 1e-5).sqrt() + norm.bias
        expected = expected + norm.eta * x if norm.eta is not None else expected
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    scale, shift = norm.affine()
    assert scale.dtype == shift.dtype == torch.float64 and not scale.requires_grad
    assert not norm.fold_obstacle
    torch.testing.assert_close((scale * x + shift, scale.expand_as(x)), (y, x.grad), rtol=1e-12, atol=1e-12)
    assert_same_state(norm, before)


@pytest.mark.parametrize('name, words', [
    ('PN', 'root mean square'), ('RMSN', 'mean square for every token'), ('DyT', 'tanh'), ('Derf', 'erf')])
def test_an_obstacle_says_why_there_is_no_affine(name, words):
    norm = build(name)
    assert words in norm.fold_obstacle
    error = RuntimeError if isinstance(norm, OfflineNorm) else AttributeError
    with pytest.raises(error, match=f'is not an affine map: it .*{words}' if error is RuntimeError else 'affine'):
        norm.affine()


@every_norm
@pytest.mark.parametrize('stop', [4, 9])
def test_save_and_resume_is_bit_equal(name, stop):
    """In and after warm-up, and in the middle of a window."""
    norm, resumed = build(name), NORMS[name].build(6)
    train_steps(norm, stop)
    file = io.BytesIO()
    torch.save(norm.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for a, b in zip(train_steps(norm, 20, stop), train_steps(resumed, 20, stop), strict=True):
        assert torch.equal(a, b)
    assert_same_state(norm, resumed)


@pytest.mark.parametrize('name, dtype', [*((name, torch.float16) for name in NORMS), ('UN', torch.bfloat16),
                                         ('TokenBN', torch.bfloat16), ('RMSN', torch.bfloat16)])
def test_half_precision_follows_float32(name, dtype):
    """Squares of 300 overflow fp16, and sums of many tokens lose everything in bf16."""
    low, high = build(name), build(name)
    for _, x, dy in sequence(20, 6, tokens=300):
        x = torch.from_numpy(x).to(dtype)
        x[:, 3] += 300 if name not in ('DyT', 'Derf') else 3
        dy = torch.from_numpy(dy).to(dtype)
        with torch.autocast('cpu', dtype=torch.bfloat16):
            ours = train_step(low, x, dy)[:2]
        for value, expected in zip(ours, train_step(high, x.float(), dy.float()), strict=False):
            assert value.dtype == dtype
            torch.testing.assert_close(value.float(), expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())
    for key, value in low.state_dict().items():
        assert not value.is_floating_point() or value.dtype == torch.float32
        if name != 'PN':  # whose statistics are of tokens that were rounded after their division
            torch.testing.assert_close(value, high.state_dict()[key], rtol=1e-4, atol=1e-4, msg=key)


@every_offline_norm
@pytest.mark.parametrize('where', ['activation', 'gradient'])
def test_a_bad_number_never_stays_in_the_state(name, where):
    norm = build(name)
    for t, x, dy in sequence(30, 6):
        tx, tdy = torch.from_numpy(x).float(), torch.from_numpy(dy).float()
        if t % 5 == 0:
            (tx if where == 'activation' else tdy)[3, 2] = (float('inf'), float('nan'), 1e30)[t % 3]
        train_step(norm, tx, tdy)
        assert_finite_state(norm)
        # An overflow must stay visible to a gradient scaler.
        assert t % 15 != 0 or not norm.weight.grad.isfinite().all()
    assert norm.eval()(torch.randn(3, 6)).isfinite().all()


numbers = st.floats(width=32)


@every_offline_norm
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_no_input_breaks_the_state(name, data):
    norm = NORMS[name].build(2)
    norm.warmup_iters, norm.exact_steps = 1, 1
    for _ in range(4):
        x, dy = (torch.tensor(data.draw(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=3)))
                 for _ in range(2))
        x = x.requires_grad_()
        norm(x).backward(dy[:1].expand_as(x))
        assert_finite_state(norm)


@every_offline_norm
def test_what_padding_holds_has_no_part_in_the_state(name):
    a, b = build(name), build(name)
    rng = np.random.default_rng(0)
    for _, x, dy in sequence(20, 6, tokens=24):
        padded = torch.from_numpy(rng.random(24) < 0.4)
        x, dy = torch.from_numpy(x).float(), torch.from_numpy(dy).float()
        dy[padded] = 0
        outputs = []
        for norm, filling in ((a, 0.), (b, float('nan'))):
            y, dx, *_ = train_step(norm, x.masked_fill(padded[:, None], filling), dy, padded)
            outputs.append((y[~padded], dx[~padded]))
        torch.testing.assert_close(*outputs)
        assert_finite_state(b)
    assert_same_state(a, b)


@every_offline_norm
@pytest.mark.parametrize('steps', [5, 20])
def test_only_padding_changes_no_statistic(name, steps):
    """In warm-up and after it."""
    norm = build(name)
    train_steps(norm, steps)
    before = copy.deepcopy(norm.state_dict())
    x = torch.randn(2, 3, 6, requires_grad=True)
    y = norm(x * 1e3, torch.ones(2, 3, dtype=torch.bool))
    y.sum().backward()
    assert y.isfinite().all()
    for key, value in norm.state_dict().items():
        if key == 'activation_record':
            assert torch.equal(value[-1], before['running_var'])
        elif key != 'num_batches_tracked' and (key, name[:2]) != ('running_var', 'UN'):  # which averages its record
            torch.testing.assert_close(value, before[key], msg=key)
    assert_finite_state(norm)


@pytest.mark.parametrize('name, masked', [*((name, False) for name in NORMS), *((name, True) for name in OFFLINE[:2])])
def test_no_host_synchronisation(name, masked):
    norm = build(name)
    mask = torch.rand(2, 5) > 0.8 if masked else None
    with NoSync():
        for _ in range(16):
            norm.train()  # as mmengine's loops do
            x = torch.randn(2, 5, 6, requires_grad=True)
            norm(x, mask).square().sum().backward()
        checkpoint(norm, x, mask, use_reentrant=False).sum().backward()
    if name in OFFLINE:
        assert norm.num_batches_tracked == 17


@pytest.mark.slow
@pytest.mark.parametrize('name', ['UN', 'UN centered', 'PN', 'RMSN', 'DyT'])
def test_compiles_as_one_graph(name):
    torch._dynamo.reset()
    plain = build(name, channels=16)
    inner = copy.deepcopy(plain)
    compiled = torch.compile(inner, fullgraph=compiles_as_one_graph(), backend='aot_eager')
    for _, x, dy in sequence(20, 16, outlier_every=9):
        torch.testing.assert_close(train_step(compiled, x, dy), train_step(plain, x, dy), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(plain.state_dict(), inner.state_dict())
    x = torch.randn(3, 16)
    torch.testing.assert_close(plain.eval()(x), compiled.eval()(x))


@every_norm
def test_built_from_every_scope_and_by_both_builders(name):
    from mmcv.cnn import build_norm_layer as build_mmcv
    from mmpretrain.models.utils import build_norm_layer as build_mmpretrain
    norm_type = type(NORMS[name].build(6)).__name__
    cfg = dict(type=norm_type)
    for scope in ('mmdet', 'mmpretrain', 'mmengine'):
        with MODELS.switch_scope_and_registry(scope) as registry:
            assert type(registry.build(dict(cfg, num_features=4))).__name__ == norm_type
    key, norm = build_mmcv(dict(cfg, requires_grad=False), 8, postfix=1)
    assert key == 'ln1' and not any(p.requires_grad for p in norm.parameters())
    norm = build_mmpretrain(dict(cfg, eps=1e-6), 8)
    assert isinstance(norm, Norm) and getattr(norm, 'eps', 1e-6) == 1e-6


@pytest.mark.parametrize('cls,kwargs,words', [
    *((cls, dict(num_features=0), ('num_features', '0')) for cls in (UN, RMSN, NoNorm)),
    (UN, dict(num_features=2.5), ('num_features', '2.5')),
    *((cls, dict(num_features=8, eps=0), ('eps', '0')) for cls in (MABN, RMSN)),
    *((cls, dict(num_features=8, alpha=alpha), ('alpha', str(alpha))) for cls in (PN, RepBN) for alpha in (1., -0.1)),
    *((UN, dict(num_features=8, warmup_iters=value), ('warmup_iters', 'share', str(value)))
      for value in (-1, 1., True)),
    *((UN, dict(num_features=8, window=value), ('window', text))
      for value, text in ((0, '0'), (True, 'True'), ((2, 3), r'\(2, 3\)'), ('4', "'4'"))),
    (DyT, dict(num_features=8, init_alpha=0), ('init_alpha', '0')),
    (UN, dict(num_features=8, forward_average='mean'),
     ('forward_average', "'gm', 'current'", "'mean'")),
    (UN, dict(num_features=8, backward_average='gm'), ('backward_average', "'am', 'current'", "'gm'")),
])
def test_bad_arguments(cls, kwargs, words):
    with pytest.raises(ValueError, match='.*'.join(words)):
        cls(**kwargs)


def test_bad_inputs():
    norm = build('UN')
    with pytest.raises(ValueError, match=r'UN: .*num_features=6.*\(2, 3\)'):
        norm(torch.randn(2, 3))
    with pytest.raises(ValueError, match=r'\(\)'):
        norm(torch.tensor(1.))
    with pytest.raises(TypeError, match='int64'):
        norm(torch.ones(2, 6, dtype=torch.long))
    with pytest.raises(ValueError, match=r'pad_mask.*\(2, 3\).*\(3, 2\)'):
        norm(torch.randn(2, 3, 6), torch.zeros(3, 2, dtype=torch.bool))
    with pytest.raises(TypeError, match='pad_mask.*float32'):
        norm(torch.randn(2, 3, 6), torch.zeros(2, 3))
