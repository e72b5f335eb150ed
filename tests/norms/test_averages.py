"""The averages over a record of statistics, and the outlier filter, as numpy computes them."""
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mmunorm.norms.averages import arithmetic_mean, geometric_mean, is_outlier, moving_average, push, root_variance

positive = st.floats(1e-3, 1e3)
records = hnp.arrays(np.float64, hnp.array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=8), elements=positive)


def outlier_of(omega, omega_prev):
    return is_outlier(omega, omega_prev, geometric_mean(omega))


@given(records)
def test_means_equal_numpy(record):
    r = torch.from_numpy(record)
    np.testing.assert_allclose(arithmetic_mean(r), record.mean(0), rtol=1e-12)
    np.testing.assert_allclose(geometric_mean(r), np.prod(record ** (1 / len(record)), axis=0), rtol=1e-10)
    np.testing.assert_allclose(root_variance(r), np.sqrt(record).var(ddof=1), rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_compiled_variance_of_huge_statistics_is_finite():
    record = 1e38 * torch.rand(4, 384, generator=torch.Generator().manual_seed(0))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(root_variance)(record), root_variance(record))
    assert root_variance(record).isfinite()


@given(records, st.data())
def test_outlier_equals_equation_18_in_numpy(omega_prev, data):
    newest = data.draw(hnp.arrays(np.float64, omega_prev.shape[1:], elements=positive))
    omega = np.concatenate([omega_prev[1:], newest[None]])
    gap = omega.mean(0) - np.exp(np.log(omega).mean(0))
    limit = len(omega) * np.sqrt(omega_prev).var(ddof=1)
    if np.all(np.abs(gap - limit) > 1e-9 * omega.mean(0)):  # rounding decides no example
        assert outlier_of(torch.from_numpy(omega), torch.from_numpy(omega_prev)).item() == np.any(gap > limit)


@given(st.integers(2, 8), st.integers(1, 16), positive)
def test_equal_statistics_are_never_an_outlier(window, channels, value):
    for dtype in (torch.float32, torch.float64):
        record = torch.full((window, channels), value, dtype=dtype)
        assert not outlier_of(record, record)


def test_push_and_moving_average():
    record = torch.arange(6.).view(3, 2)
    assert push(record, torch.tensor([8., 9.])).tolist() == [[2, 3], [4, 5], [8, 9]]
    assert record.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert moving_average(torch.tensor(1.), torch.tensor(2.), 0.9).item() == np.float32(1.1)
