import numpy as np

from projects.low_light.low_light import figures


def test_each_image_has_a_row_with_its_light():
    rng = np.random.default_rng(0)
    lights = [figures.Light(f'{i}.png', *rng.integers(0, 256, (2, 8, 12, 3), np.uint8), 0.5 + i, np.eye(3) * (1 + i))
              for i in range(2)]
    axes = figures.light_figure(lights).axes
    assert [ax.get_title() for ax in axes] == ['0.png', '', 'gamma 0.50', '1.png', '', 'gamma 1.50']
    assert [text.get_text() for text in axes[5].texts] == ['2.00' if i == j else '0.00' for i, j in np.ndindex(3, 3)]
    np.testing.assert_array_equal(axes[4].images[0].get_array(), lights[1].after)
