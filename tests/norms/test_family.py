"""Every norm against its own paper's equations, and the guarantees that all of them give."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mmunorm.norms import MABN, PN, RMSN, UN, DyT, NoNorm, PRepBN, RepBN, TokenBN

from . import reference_family as ref
from .test_un import sequence

# With warm-ups that end soon, so that a short test sees both sides of them.
NORMS = {
    'UN': lambda c: UN(c, warmup_iters=6),
    'MABN': lambda c: MABN(c, window=5, alpha=0.9, warmup_iters=6),
    'PN': lambda c: PN(c, warmup_iters=6),
    'PN*': lambda c: PN(c, layer_scale=False, warmup_iters=6),
    'TokenBN': TokenBN,
    'RepBN': RepBN,
    'PRepBN': lambda c: PRepBN(c, steps=12),
    'RMSN': RMSN,
    'DyT': DyT,
    'NoNorm': NoNorm,
    'NoNorm affine': lambda c: NoNorm(c, affine=True),
}
OFFLINE = [name for name in NORMS if name not in ('RMSN', 'DyT', 'NoNorm', 'NoNorm affine')]
FOLDABLE = [name for name in NORMS if name not in ('PN', 'RMSN', 'DyT')]

every_norm = pytest.mark.parametrize('name', NORMS)
every_offline_norm = pytest.mark.parametrize('name', OFFLINE)


def build(name, channels=6, seed=0):
    """The norm with random parameters of both signs."""
    norm = NORMS[name](channels)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return norm


def reference(name, norm):
    p = {key: value.detach().double().numpy() for key, value in norm.named_parameters()}
    affine = p.get('weight'), p.get('bias')
    if name == 'MABN':
        return ref.ReferenceMABN(*affine, norm.window[1], norm.alpha, norm.warmup_iters)
    if name in ('PN', 'PN*'):
        return ref.ReferencePN(*affine, norm.layer_scale, norm.alpha, norm.warmup_iters)
    if name in ('TokenBN', 'RepBN'):
        return ref.ReferenceBN(*affine, p.get('eta'))
    if name == 'PRepBN':
        return ref.ReferencePRepBN(ref.ReferenceBN(*affine, p['eta']),
                                   ref.ReferenceLN(p['ln_weight'], p['ln_bias']), norm.steps)
    if name == 'RMSN':
        return ref.ReferenceRMSN(p['weight'])
    if name == 'DyT':
        return ref.ReferenceDyT(*affine, p['alpha'])
    return ref.ReferenceAffine(*(affine if 'weight' in p else (1., 0.)))


@pytest.mark.parametrize('masked', [False, True], ids=['', 'pad_mask'])
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32], ids=['float64', 'float32'])
@pytest.mark.parametrize('name', [name for name in NORMS if name != 'UN'])
def test_equals_its_papers_equations(name, dtype, masked):
    norm = build(name).to(dtype)
    expected = reference(name, norm)
    tol = dict(rtol=1e-8, atol=1e-9) if dtype is torch.float64 else dict(rtol=1e-3, atol=1e-3)
    rng = np.random.default_rng(5)
    for _, x, dy in sequence(80, 6, outlier_every=30, tokens=24):
        padded = rng.random(24) < 0.4 if masked else np.zeros(24, bool)
        tx = torch.from_numpy(x).to(dtype).view(2, 12, 6).requires_grad_()
        norm.zero_grad()
        y = norm(tx, torch.from_numpy(padded).view(2, 12) if masked else None)
        y.backward(torch.from_numpy(dy).to(dtype).view(2, 12, 6))
        np.testing.assert_allclose(y.detach().view(24, 6), expected.forward(x, padded), **tol)
        dx, grads = expected.backward(dy)
        np.testing.assert_allclose(tx.grad.view(24, 6), dx, **tol)
        for key, parameter in norm.named_parameters():
            np.testing.assert_allclose(parameter.grad, grads[key], **tol, err_msg=key)
        for key, value in expected.state().items():
            np.testing.assert_allclose(getattr(norm, key), value, **tol, err_msg=key)


@pytest.mark.parametrize('momentum', [0.1, 0.4])
def test_token_bn_is_torch_batch_norm(momentum):
    norm = build('TokenBN').double()
    norm.alpha = 1 - momentum
    torch_bn = nn.BatchNorm1d(6, momentum=momentum).double()
    torch_bn.load_state_dict(norm.state_dict())
    for _, x, dy in sequence(30, 6, tokens=24):
        outputs = []
        for layer, shape in ((norm, (2, 3, 4, 6)), (torch_bn, (24, 6))):
            tx = torch.from_numpy(x).view(shape).requires_grad_()
            layer.zero_grad()
            y = layer(tx)
            y.backward(torch.from_numpy(dy).view(shape))
            outputs.append([y.view(24, 6), tx.grad.view(24, 6), layer.weight.grad, layer.bias.grad])
        for ours, theirs in zip(*outputs, strict=True):
            torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(norm.state_dict(), torch_bn.state_dict())
    x = torch.randn(24, 6, dtype=torch.float64)
    torch.testing.assert_close(norm.eval()(x), torch_bn.eval()(x))


@pytest.mark.parametrize('offset', [100., 1e4])
def test_token_bn_of_a_small_variance_beside_a_large_mean(offset):
    x = (torch.randn(4096, 4, generator=torch.Generator().manual_seed(0)) + offset).requires_grad_()
    dy = torch.randn(4096, 4, generator=torch.Generator().manual_seed(1))
    norm, exact = TokenBN(4), TokenBN(4).double()
    exact_x = x.detach().double().requires_grad_()
    y, exact_y = norm(x), exact(exact_x)
    y.backward(dy)
    exact_y.backward(dy.double())
    tol = dict(rtol=0, atol=offset * 1e-6)
    torch.testing.assert_close(norm.running_var.double(), exact.running_var, rtol=1e-5, atol=0)
    torch.testing.assert_close(y.double(), exact_y, **tol)
    torch.testing.assert_close(x.grad.double(), exact_x.grad, **tol)
    torch.testing.assert_close(norm.weight.grad.double(), exact.weight.grad, rtol=1e-3, atol=offset * 1e-4)


@given(st.integers(1, 40), st.integers(1, 9), st.floats(-50, 50), st.floats(0.01, 10), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_token_bn_equals_torch_on_any_input(tokens, channels, offset, scale, seed):
    x = torch.randn(tokens + 1, channels, dtype=torch.float64,
                    generator=torch.Generator().manual_seed(seed)) * scale + offset
    norm, torch_bn = TokenBN(channels).double(), nn.BatchNorm1d(channels).double()
    torch.testing.assert_close(norm(x), torch_bn(x), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(norm.state_dict(), torch_bn.state_dict())


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
def test_rmsn_is_torch_rms_norm(dtype):
    norm, torch_norm = build('RMSN').to(dtype), nn.RMSNorm(6, eps=1e-5, dtype=dtype)
    torch_norm.load_state_dict(norm.state_dict())
    x = torch.randn(3, 5, 6, dtype=dtype, requires_grad=True)
    x2 = x.detach().clone().requires_grad_()
    y, y2 = norm(x), torch_norm(x2)
    y.backward(torch.ones_like(y))
    y2.backward(torch.ones_like(y2))
    assert y.dtype == dtype
    tol = dict(rtol=2e-2, atol=2e-2) if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(y, y2, **tol)
    torch.testing.assert_close(x.grad, x2.grad, **tol)
    torch.testing.assert_close(norm.weight.grad, torch_norm.weight.grad, **tol)
