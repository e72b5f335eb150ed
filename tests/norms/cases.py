"""Norms, inputs and checks shared by tests of norms."""
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mmunorm.norms import MABN, PN, RMSN, UN, Derf, DyT, NoNorm, Norm, OfflineNorm, RepBN, TokenBN

from . import reference_family as ref
from .reference_un import ReferenceUN

AFFINE = {'weight', 'bias'}
RUNNING = AFFINE | {'running_var', 'num_batches_tracked'}
UN_STATE = RUNNING | {'activation_record', 'gradient_record', 'psi', 'num_outliers'}
MEANS = {'running_mean', 'eta'}


def un(norm, weight, bias, eta=None):
    """UN or MABN in numpy."""
    if isinstance(norm, MABN):
        return ReferenceUN(weight, bias, norm.window, norm.alpha, norm.warmup_iters, False, norm.eps, 'ema',
                           backward_momentum=False)
    return ReferenceUN(
        weight, bias, norm.window, norm.alpha, norm.warmup_iters, norm.outlier_filter, norm.eps, norm.forward_average,
        norm.backward_average, norm.backward_momentum, norm.centered, eta,
        0. if norm.running_mean is None else norm.running_mean.double().numpy())


def pn(norm, weight, bias):
    return ref.ReferencePN(weight, bias, norm.layer_scale, norm.alpha, norm.warmup_iters)


def bn(norm, **parameters):
    return ref.ReferenceBN(**parameters)


def formula(function):
    return lambda norm, **parameters: ref.ReferenceFormula(function, **parameters)


class Case(NamedTuple):
    """A norm to test: how to build it for C channels, its reference in numpy, and the names in its state_dict."""
    build: Callable[[int], Norm]
    reference: Callable
    state: set[str]


# With warm-ups that end soon, so that a short test sees both sides of them.
NORMS = {
    'UN': Case(lambda c: UN(c, warmup_iters=6), un, UN_STATE),
    'UN centered': Case(lambda c: UN(c, warmup_iters=6, centered=True, eta=0.), un, UN_STATE | MEANS),
    'UN frozen': Case(lambda c: UN(c, warmup_iters=6, centered='frozen', eta=0.), un, UN_STATE | MEANS),
    'MABN': Case(lambda c: MABN(c, window=5, alpha=0.9, warmup_iters=6), un, RUNNING | {'gradient_record', 'psi'}),
    'PN': Case(lambda c: PN(c, warmup_iters=6), pn, RUNNING | {'psi'}),
    'PN*': Case(lambda c: PN(c, layer_scale=False, warmup_iters=6), pn, RUNNING | {'psi'}),
    'TokenBN': Case(TokenBN, bn, RUNNING | {'running_mean'}),
    'RepBN': Case(RepBN, bn, RUNNING | MEANS),
    'RMSN': Case(RMSN, formula(ref.rmsn), {'weight'}),
    'DyT': Case(DyT, formula(ref.dyt), AFFINE | {'alpha'}),
    'Derf': Case(Derf, formula(ref.derf), AFFINE | {'alpha', 'shift'}),
    'NoNorm': Case(NoNorm, formula(ref.affine), set()),
    'NoNorm affine': Case(lambda c: NoNorm(c, affine=True), formula(ref.affine), AFFINE),
}
OFFLINE = [name for name, case in NORMS.items() if isinstance(case.build(1), OfflineNorm)]

every_norm = pytest.mark.parametrize('name', NORMS)
every_offline_norm = pytest.mark.parametrize('name', OFFLINE)


def build(name, channels=6, seed=0):
    """The norm with random parameters of both signs."""
    norm = NORMS[name].build(channels)
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


def assert_equals_reference(norm, reference, steps, masked, rtol, atol, shift=0.):
    """Outputs, gradients and state of every step; returns the reference after the last."""
    expected = reference(norm, **{key: value.detach().double().numpy() for key, value in norm.named_parameters()})
    tol = dict(rtol=rtol, atol=atol)
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
    x, dy = (torch.from_numpy(value).float() if isinstance(value, np.ndarray) else value for value in (x, dy))
    tx = x.detach().clone().requires_grad_()
    norm.zero_grad()
    y = norm(tx, *mask)
    y.backward(dy)
    return [y.detach(), tx.grad, *(p.grad.clone() for p in norm.parameters())]


def train_steps(norm, steps, start=0):
    """The results of :func:`train_step` over `steps` of one fixed sequence, from step `start + 1`."""
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
