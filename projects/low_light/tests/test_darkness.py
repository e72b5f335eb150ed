import numpy as np

from projects.low_light.low_light.darkness import darken


def test_a_dark_image_is_dark_noisy_and_in_the_same_order():
    grey = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 300, 1)
    for seed in range(8):
        dark = darken(grey, np.random.default_rng(seed))
        assert dark.shape == grey.shape and dark.dtype == np.uint8
        means = dark.mean(1)
        assert (means[20:] <= grey[20:, 0]).all() and means[128] < 0.3 * 128
        assert np.corrcoef(np.argsort(means[100:]), np.arange(156))[0, 1] > 0.8
        assert dark[250].std() > 0.5
        np.testing.assert_array_equal(dark, darken(grey, np.random.default_rng(seed)))
