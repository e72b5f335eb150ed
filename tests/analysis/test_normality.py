import numpy as np
import pytest

from mmunorm.analysis.normality import density, pnac, spans


def noise(steps=200, channels=2000, seed=0):
    return np.random.default_rng(seed).standard_normal((steps, channels))


def test_normal_noise_is_near_95():
    # 2000 channels at p = 0.05: the share's own deviation is half a percent.
    result = pnac(5 + 0.1 * noise())
    assert 93 < result.percent < 97
    assert result[1:] == (2000, 0, 200)


def test_log_normal_falls_with_sigma():
    percents = [pnac(np.exp(sigma * noise())).percent for sigma in (0.02, 0.1, 0.3, 1.0)]
    assert percents[0] > 90 and percents[-1] < 1
    assert percents == sorted(percents, reverse=True)


def _k2(values):
    """D'Agostino and Pearson's statistic from their 1990 paper's formulas, in plain Python."""
    n, mean = len(values), sum(values) / len(values)
    m2, m3, m4 = (sum((value - mean) ** power for value in values) / n for power in (2, 3, 4))
    y = m3 / m2**1.5 * ((n + 1) * (n + 3) / (6 * (n - 2))) ** 0.5
    beta = 3 * (n * n + 27 * n - 70) * (n + 1) * (n + 3) / ((n - 2) * (n + 5) * (n + 7) * (n + 9))
    w2 = -1 + (2 * (beta - 1)) ** 0.5
    z1 = np.arcsinh(y / (2 / (w2 - 1)) ** 0.5) / np.log(w2**0.5) ** 0.5
    expected = 3 * (n - 1) / (n + 1)
    variance = 24 * n * (n - 2) * (n - 3) / ((n + 1) ** 2 * (n + 3) * (n + 5))
    x = (m4 / m2**2 - expected) / variance**0.5
    root_beta = 6 * (n * n - 5 * n + 2) / ((n + 7) * (n + 9)) * (6 * (n + 3) * (n + 5)
                                                                / (n * (n - 2) * (n - 3))) ** 0.5
    a = 6 + 8 / root_beta * (2 / root_beta + (1 + 4 / root_beta**2) ** 0.5)
    z2 = (1 - 2 / (9 * a) - np.cbrt((1 - 2 / a) / (1 + x * (2 / (a - 4)) ** 0.5))) / (2 / (9 * a)) ** 0.5
    return z1**2 + z2**2


@pytest.mark.parametrize('steps', [20, 50, 200])
def test_agrees_with_the_published_formulas(steps):
    # Between normal and not, so that some channels pass and some do not.
    values = np.exp(0.3 * noise(steps, 60, seed=1))
    p = np.exp(-np.array([_k2(channel) for channel in values.T]) / 2)  # chi-square, two degrees of freedom
    expected = 100 * (p > 0.05).mean()
    assert 0 < expected < 100
    assert pnac(values).percent == pytest.approx(expected)


@pytest.mark.parametrize('scale', [1e-30, 1e-12, 1e6])
def test_the_scale_does_not_matter(scale):
    values = np.exp(0.3 * noise(100, 300))
    assert pnac(values * scale).percent == pnac(values).percent


def test_constant_channels_are_left_out_and_counted():
    values = noise(100, 10).astype(np.float32)
    values[:, :3] = [0, 1, 0.1]
    values[::2, 2] = np.nextafter(np.float32(0.1), np.float32(1))  # rounding is no fluctuation
    result = pnac(values)
    assert result[1:] == (7, 3, 100)
    assert result.percent == pnac(values[:, 3:]).percent
    nothing = pnac(np.ones((50, 4)))
    assert np.isnan(nothing.percent) and nothing[1:] == (0, 4, 50)


def test_steps_that_are_not_finite_are_left_out():
    values = noise(100, 50)
    holes = np.insert(values, [10, 60], np.full((2, 50), [[np.inf], [np.nan]]), axis=0)
    assert pnac(holes) == pnac(values)
    missing = pnac(np.full((100, 5), np.nan))
    assert np.isnan(missing.percent) and missing[1:] == (0, 0, 0)


def test_short_sequences_are_refused():
    with pytest.raises(ValueError, match='at least 20 steps, got 19'):
        pnac(noise(19, 3))


def test_spans_are_of_one_length_and_the_last_is_the_end():
    for steps, span, starts in ((100, 20, [0, 20, 40, 60, 80]), (119, 20, [0, 20, 40, 60, 99]),
                                (752, 100, [0, 100, 200, 300, 400, 500, 652]), (20, 20, [0]), (39, 20, [19])):
        assert spans(steps, span) == [slice(start, start + span) for start in starts]
    with pytest.raises(ValueError, match='19 steps are recorded'):
        spans(19, 20)
    with pytest.raises(ValueError, match='span=5'):
        spans(100, 5)


def test_density_is_a_density_with_the_right_place():
    values = np.array([30.0, 31, 32, 70, np.nan])
    grid = np.linspace(-100, 200, 3001)
    curve = density(values, grid)
    # Scott's rule by hand: a Gaussian at each value.
    width = np.std(values[:4], ddof=1) * 4 ** (-1 / 5)
    expected = np.mean([np.exp(-((grid - value) / width) ** 2 / 2) for value in values[:4]], axis=0)
    np.testing.assert_allclose(curve, expected / (width * (2 * np.pi) ** 0.5), atol=1e-12)
    assert np.isnan(density(np.array([5.0, 5.0]), grid)).all()
    assert np.isnan(density(np.array([5.0]), grid)).all()
