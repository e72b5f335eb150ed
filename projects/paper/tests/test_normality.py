import numpy as np
import pytest

from projects.paper.paper.normality import density, pnac, spans


def noise(steps=200, channels=2000, seed=0):
    return np.random.default_rng(seed).standard_normal((steps, channels))


def test_normal_noise_is_near_95_and_log_normal_falls_with_sigma():
    # 2000 channels at p = 0.05: the share's own deviation is half a percent.
    result = pnac(5 + 0.1 * noise())
    assert 93 < result.percent < 97
    assert result[1:] == (2000, 0, 200)
    percents = [pnac(np.exp(sigma * noise())).percent for sigma in (0.02, 0.1, 0.3, 1.0)]
    assert percents[0] > 90 and percents[-1] < 1
    assert percents == sorted(percents, reverse=True)


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
    missing = pnac(np.concatenate([values[:19], np.full((100, 50), np.nan)]))
    assert np.isnan(missing.percent) and missing[1:] == (0, 0, 19)


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
    # Scott's rule: a Gaussian at each value.
    width = np.std(values[:4], ddof=1) * 4 ** (-1 / 5)
    expected = np.mean([np.exp(-((grid - value) / width) ** 2 / 2) for value in values[:4]], axis=0)
    np.testing.assert_allclose(density(values, grid), expected / (width * (2 * np.pi) ** 0.5), atol=1e-12)
    for empty in ([5.0, 5.0], [5.0]):
        assert np.isnan(density(np.array(empty), grid)).all()
