import numpy as np

from mmunorm.analysis.layout import save
from mmunorm.analysis.light import Light, light_figure


def test_each_picture_has_a_row_with_its_numbers(tmp_path):
    rng = np.random.default_rng(0)
    lights = [Light(f'{i}.png', *rng.integers(0, 256, (2, 8, 12, 3), np.uint8), 0.5 + i, np.eye(3) * (1 + i))
              for i in range(2)]
    figure = light_figure(lights)
    assert len(figure.axes) == 6
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ['0.png', '', 'gamma 0.50', '1.png', '', 'gamma 1.50']
    assert [text.get_text() for text in figure.axes[5].texts] == ['2.00' if i == j else '0.00'
                                                                  for i in range(3) for j in range(3)]
    np.testing.assert_array_equal(figure.axes[4].images[0].get_array(), lights[1].after)
    save(figure, tmp_path / 'light.png')
    assert (tmp_path / 'light.png').stat().st_size > 1000
