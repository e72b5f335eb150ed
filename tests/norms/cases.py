"""Norms, inputs and checks that several tests of norms share."""
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmunorm.norms import MABN, PN, RMSN, UN, Derf, DyT, NoNorm, PRepBN, RepBN, TokenBN

from . import reference_family as ref
from .reference_un import ReferenceUN

# With warm-ups that end soon, so that a short test sees both sides of them.
NORMS = {
    'UN': lambda c: UN(c, warmup_iters=6),
    'UN centered': lambda c: UN(c, warmup_iters=6, centered=True, eta=0.),
    'UN frozen': lambda c: UN(c, warmup_iters=6, centered='frozen', eta=0.),
    'MABN': lambda c: MABN(c, window=5, alpha=0.9, warmup_iters=6),
    'PN': lambda c: PN(c, warmup_iters=6),
    'PN*': lambda c: PN(c, layer_scale=False, warmup_iters=6),
    'TokenBN': TokenBN,
    'RepBN': RepBN,
    'PRepBN': lambda c: PRepBN(c, steps=12),
    'RMSN': RMSN,
    'DyT': DyT,
    'Derf': Derf,
    'NoNorm': NoNorm,
    'NoNorm affine': lambda c: NoNorm(c, affine=True),
}
OFFLINE = [name for name in NORMS if name not in ('RMSN', 'DyT', 'Derf', 'NoNorm', 'NoNorm affine')]

every_norm = pytest.mark.parametrize('name', NORMS)
every_offline_norm = pytest.mark.parametrize('name', OFFLINE)


def build(name, channels=6, seed=0):
    """The norm with random parameters of both signs."""
    norm = NORMS[name](channels)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        if name == 'UN frozen':
            norm.running_mean.copy_(torch.randn(channels, generator=generator))
    return norm


def random_affine(norm, seed=0):
    """Gamma with both signs and a zero, beta at random."""
    rng = np.random.default_rng(seed)
    gamma, beta = rng.normal(size=norm.num_features), rng.normal(size=norm.num_features)
    gamma[0] = 0
    with torch.no_grad():
        norm.weight.copy_(torch.from_numpy(gamma))
        norm.bias.copy_(torch.from_numpy(beta))
    return norm


def reference_of(norm):
    """The norm in numpy, with its parameters, before its first step."""
    p = {key: value.detach().double().numpy() for key, value in norm.named_parameters()}
    affine = p.get('weight'), p.get('bias')
    if isinstance(norm, (UN, MABN)):
        return ReferenceUN(
            *affine, norm.window, norm.alpha, norm.warmup_iters, norm.outlier_filter,
            norm.outlier_variance == 'channel', norm.eps, norm.forward_average, norm.backward_average,
            norm.backward_momentum, norm.centered, p.get('eta'))
    if isinstance(norm, PN):
        return ref.ReferencePN(*affine, norm.layer_scale, norm.alpha, norm.warmup_iters)
    if isinstance(norm, PRepBN):
        layer_norm = ref.ReferenceFormula(ref.ln, ln_weight=p['ln_weight'], ln_bias=p['ln_bias'])
        return ref.ReferencePRepBN(ref.ReferenceBN(*affine, p['eta']), layer_norm, norm.steps)
    if isinstance(norm, TokenBN):  # RepBN too
        return ref.ReferenceBN(*affine, p.get('eta'))
    formulas = {RMSN: ref.rmsn, DyT: ref.dyt, Derf: ref.derf, NoNorm: ref.affine}
    return ref.ReferenceFormula(formulas[type(norm)], **p)


def assert_equals_reference(norm, steps, masked, rtol, atol, shift=0.):
    """Outputs, gradients and state of every step; the reference after the last."""
    expected, tol = reference_of(norm), dict(rtol=rtol, atol=atol)
    rng, dtype = np.random.default_rng(5), next((p.dtype for p in norm.parameters()), torch.float64)
    for t, x, dy in sequence(steps, 6, tokens=24):
        x = x + shift * (1 + 0.01 * t)
        padded = rng.random(24) < 0.4 * masked
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
    return expected


def sequence(steps, channels, seed=0, outlier_every=17, outlier_scale=30., tokens=23):
    """Inputs and output gradients with a planted outlier step now and then, in one channel."""
    rng = np.random.default_rng(seed)
    size = rng.uniform(0.2, 3, channels)
    for t in range(1, steps + 1):
        x = rng.normal(size=(tokens, channels)) * size * rng.lognormal(0, 0.1)
        if t % outlier_every == 0:
            x[:, rng.integers(channels)] *= outlier_scale
        yield t, x, rng.normal(size=(tokens, channels)) * rng.lognormal(0, 0.3)


def train_step(norm, x, dy, *mask):
    """Output, and gradients of the input and the parameters; `x` and `dy` may be of numpy, which is then float32."""
    x, dy = (torch.from_numpy(each).float() if isinstance(each, np.ndarray) else each for each in (x, dy))
    tx = x.detach().clone().requires_grad_()
    norm.zero_grad()
    y = norm(tx, *mask)
    y.backward(dy)
    return [y.detach(), tx.grad, *(p.grad.clone() for p in norm.parameters())]


def train_steps(norm, steps, start=0):
    """What :func:`train_step` returns over `steps` of one fixed sequence, from step `start + 1`."""
    return [value for t, x, dy in sequence(start + steps, norm.num_features) if t > start
            for value in train_step(norm, x, dy)]


def assert_same_state(a, b):
    assert a.state_dict().keys() == b.state_dict().keys()
    for key, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[key]), key


def assert_finite_state(norm):
    for key, value in norm.state_dict().items():
        assert value.isfinite().all(), key


class NoSync(TorchDispatchMode):
    """Fails on every operator that would make a host wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default,
                            torch.ops.aten.nonzero.default, torch.ops.aten.equal.default), func
        return func(*args, **(kwargs or {}))
