import math

import numpy as np
import pytest
import torch
from torch import nn

from mmunorm.backbones.performer import PerformerAttention, PerformerLayer, performer_attention

from ..versions import needs_float16_autocast


def layer_norm(x, norm):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + norm.eps) * array(norm.weight) + array(norm.bias)


def linear(x, layer):
    return x @ array(layer.weight).T + array(layer.bias)


def array(tensor):
    return tensor.detach().double().numpy()


def straight_line_attention(q, k, v, w):
    """In float64."""
    features = [np.exp(x @ w.T - np.square(x).sum(-1, keepdims=True) / 2) / math.sqrt(len(w)) for x in (q, k)]
    kernel = np.einsum('bim,bjm->bij', *features)
    return kernel @ v / (kernel.sum(-1, keepdims=True) + 1e-8)


@pytest.mark.parametrize('dtype, rtol', [(torch.float64, 1e-9), (torch.float32, 2e-5)])
def test_layer_equals_the_straight_line_computation(dtype, rtol):
    layer = PerformerLayer(10, 6, norm_cfg=dict(type='LN')).to(dtype).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 7, 10, dtype=dtype)

    kqv = linear(layer_norm(array(x), layer.ln1), layer.attn.kqv)
    k, q, v = kqv[..., :6], kqv[..., 6:12], kqv[..., 12:]
    y = v + linear(straight_line_attention(q, k, v, array(layer.attn.w)), layer.attn.proj)
    hidden = linear(layer_norm(y, layer.ln2), layer.ffn.layers[0][0])
    hidden = hidden / 2 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
    expected = y + linear(hidden, layer.ffn.layers[1])
    np.testing.assert_allclose(array(layer(x)), expected, rtol=rtol, atol=rtol)


def test_skip_connection_comes_from_the_values_and_dropout_before_it():
    attention = PerformerAttention(10, 6, drop_rate=0.5)
    nn.init.zeros_(attention.proj.weight)
    nn.init.ones_(attention.proj.bias)
    x = torch.randn(4, 50, 10)
    v = attention.kqv(x)[..., 12:]
    torch.testing.assert_close(attention.eval()(x), v + 1)
    dropped = attention.train()(x) - v
    assert 0.4 < (dropped > 1).float().mean() < 0.6  # kept: scaled to 2
    assert ((dropped.abs() < 1e-5) | ((dropped - 2).abs() < 1e-5)).all()


def test_random_directions_are_orthogonal_reproducible_saved_and_not_trained():
    def build(seed):
        torch.manual_seed(seed)
        return PerformerAttention(10, 64)

    attention = build(1)
    assert attention.w.shape == (32, 64)
    torch.testing.assert_close(attention.w @ attention.w.t(), 32 * torch.eye(32), atol=1e-4, rtol=0)
    assert torch.equal(attention.w, build(1).w)
    other = build(2)
    assert not torch.equal(attention.w, other.w)
    assert 'w' not in dict(attention.named_parameters())
    other.load_state_dict(attention.state_dict())
    x = torch.randn(2, 5, 10)
    assert torch.equal(other.eval()(x), attention.eval()(x))


@pytest.mark.parametrize('dtype', [pytest.param(torch.float16, marks=needs_float16_autocast), torch.bfloat16])
def test_half_precision_only_rounds_the_inputs(dtype):
    q, k, v = torch.randn(3, 2, 40, 64).to(dtype)
    w = PerformerAttention(64, 64).w
    expected = performer_attention(q.float(), k.float(), v.float(), w).to(dtype)
    with torch.autocast('cpu', dtype):
        output = performer_attention(q, k, v, w)
    assert output.dtype == dtype
    assert torch.equal(output, expected)


@pytest.mark.parametrize('dtype', [torch.float16, torch.float32])
@pytest.mark.parametrize('scale', [0., 1e4])
def test_large_and_zero_inputs_stay_finite(dtype, scale):
    q, k, v = (scale * torch.randn(3, 2, 40, 64)).to(dtype).unbind()
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    w = PerformerAttention(64, 64, kernel_ratio=1).w
    output = performer_attention(*inputs, w)
    output.float().sum().backward()
    assert output.isfinite().all()
    assert all(t.grad.isfinite().all() for t in inputs)
    # The exponent is largest where a token equals a random direction.
    assert performer_attention(*[w.unsqueeze(0)] * 3, w).isfinite().all()
