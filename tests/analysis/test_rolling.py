import numpy as np
import pytest
from scipy.stats import gmean

from mmunorm.analysis.rolling import peak, rolling_means


def test_rolling_means_are_scipys():
    values = np.random.default_rng(0).lognormal(size=30)
    gm, am = rolling_means(values, 4)
    assert np.isnan(gm[:3]).all() and np.isnan(am[:3]).all()
    for t in range(3, 30):
        assert gm[t] == pytest.approx(gmean(values[t - 3:t + 1]))
        assert am[t] == pytest.approx(values[t - 3:t + 1].mean())
    assert (gm[3:] <= am[3:]).all()


def test_negative_values_have_no_geometric_mean():
    gm, am = rolling_means(np.array([1., 4, -1, 4, 1]), 2)
    assert gm[1] == pytest.approx(2) and np.isnan(gm[[0, 2, 3]]).all() and gm[4] == pytest.approx(2)
    np.testing.assert_allclose(am[1:], [2.5, 1.5, 1.5, 2.5])


@pytest.mark.parametrize('window', [0, 6])
def test_windows_that_do_not_fit(window):
    with pytest.raises(ValueError, match=f'window={window}'):
        rolling_means(np.ones(5), window)


def test_the_peak_is_found():
    values = np.ones((50, 4)) * [1, 10, 100, 0]
    values[20, 1] = 80
    values[30, 2] = -500
    values[40] = np.nan
    assert peak(values) == 1
    assert peak(np.zeros((5, 2))) == peak(np.full((5, 2), np.nan)) == 0
