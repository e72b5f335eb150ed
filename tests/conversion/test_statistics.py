"""The nearest map to a LayerNorm, and its error, against numpy's least squares in float64."""
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from mmunorm.conversion.statistics import nearest_affine, relative_error, token_sums, valid_tokens
from mmunorm.fusion.norms import affine_of

from .models import layer_norm, tokens

EPS32 = torch.finfo(torch.float32).eps


def least_squares(x, y, beta):
    """numpy: scale and shift of each channel from tokens `x` to `y`, and the error that is left."""
    maps, left, y = [], 0, y.numpy()
    for c in range(x.shape[-1]):
        matrix = np.stack([x[:, c].numpy(), np.ones(len(x))], axis=1)
        solution = np.linalg.lstsq(matrix, y[:, c], rcond=None)[0]
        maps.append(solution)
        left += np.square(matrix @ solution - y[:, c]).mean()
    size = np.square(y - beta.numpy()).mean(axis=0).sum()
    return np.array(maps).T, left / size


@settings(max_examples=25, deadline=None)
@given(channels=st.integers(2, 9), count=st.integers(3, 40), seed=st.integers(0, 999), size=st.floats(0.01, 100))
def test_the_nearest_map_is_that_of_least_squares(channels, count, seed, size):
    x = tokens(count, channels, seed=seed).double() * size
    norm = layer_norm(channels, seed)
    sums = sum(token_sums(part, norm.eps) for part in x.split(7))
    gamma, beta = affine_of(norm)
    a, b = nearest_affine(sums, gamma, beta, EPS32)
    (expected_a, expected_b), error = least_squares(x, F.layer_norm(x, (channels, ), gamma, beta, norm.eps), beta)
    np.testing.assert_allclose(a, expected_a, rtol=1e-6, atol=1e-9 / size)
    np.testing.assert_allclose(b, expected_b, rtol=1e-6, atol=1e-8)
    assert relative_error(sums, gamma, beta, a, b) == pytest.approx(error, rel=1e-6, abs=1e-9)


def test_the_error_of_any_map():
    x, norm = tokens(50, 5).double(), layer_norm(5)
    gamma, beta = affine_of(norm)
    a, b = torch.randn(2, 5, dtype=torch.float64)
    y = F.layer_norm(x, (5, ), gamma, beta, norm.eps)
    expected = (y - a * x - b).square().sum() / (y - beta).square().sum()
    assert relative_error(token_sums(x, norm.eps), gamma, beta, a, b) == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize('spread', [0, EPS32 / 2, 1e-5])
def test_a_channel_that_varies_by_rounding_alone_gets_no_scale(spread):
    x = tokens(20, 4).double()
    x[:, 1] = 1 / 3
    x[::2, 1] *= 1 + spread
    x[1::2, 1] *= 1 - spread
    norm = layer_norm(4).double()
    gamma, beta = affine_of(norm)
    a, b = nearest_affine(token_sums(x, norm.eps), gamma, beta, EPS32)
    assert (a != 0).tolist() == [True, spread > EPS32, True, True]
    if spread > EPS32:
        return
    torch.testing.assert_close(b[1], norm(x)[:, 1].mean(), rtol=1e-6, atol=0)


def test_a_norm_without_scale_or_shift():
    gamma, beta = affine_of(torch.nn.LayerNorm(3, elementwise_affine=False))
    assert gamma.tolist() == [1, 1, 1] and beta.tolist() == [0, 0, 0]
    gamma, beta = affine_of(layer_norm(3, bias=False))
    assert beta.tolist() == [0, 0, 0] and gamma[0] != 1


def test_one_token_without_other_dimensions():
    assert valid_tokens(tokens(3), None).shape == (1, 3)


def test_no_scale_at_all_is_no_error():
    zero = torch.zeros(3, dtype=torch.float64)
    sums = token_sums(tokens(9, 3).double(), 1e-5)
    assert relative_error(sums, zero, zero, *nearest_affine(sums, zero, zero, EPS32)) == 0
    assert relative_error(sums, zero, zero, zero + 1, zero) == 0
