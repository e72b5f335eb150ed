"""Names and lines in the figures; all text fits, for any number of runs."""
import numpy as np
import pytest
from matplotlib.colors import same_color

from projects.paper.paper import NormRecord, figures
from projects.paper.paper.curves import curves_figure
from projects.paper.paper.layout import wrapped
from projects.paper.paper.measures import channel_history, measure_pnac

from .records import NAMES, write_record

LONG = 'work_dirs/compare/swin_un_classifier_recorded_with_a_very_long_name_of_the_run_{}/seed_0 (TokenBN)'
SHORT = 'norm{} (UN)'


def check_layout(figure, height):
    """All text is inside the image, panels keep about their height, and the legend covers none."""
    figure.draw_without_rendering()
    width, total = figure.get_size_inches()
    box = figure.get_tightbbox()
    assert box.x0 > -0.01 and box.y0 > -0.01 and box.x1 < width + 0.01 and box.y1 < total + 0.01
    panels = [axes for axes in figure.axes if axes.get_label() != '<colorbar>']
    for axes in panels:
        assert 0.85 < axes.get_window_extent().height / figure.dpi / height < 1.5
        assert axes.get_window_extent().width / figure.dpi > 1
    title = figure.get_suptitle() and figure._suptitle.get_window_extent()
    for axes in panels:
        around = axes.get_tightbbox()
        assert not title or not around.overlaps(title)
        assert not any(around.overlaps(legend.get_window_extent()) for legend in figure.legends)


def without_spaces(text):
    return ''.join(text.split())


def names_of(legend):
    return [without_spaces(text.get_text()) for text in legend.get_texts()]


@pytest.fixture(scope='module')
def record(tmp_path_factory):
    return NormRecord(write_record(tmp_path_factory.mktemp('record')) / 'norm_statistics')


@pytest.fixture(scope='module')
def measure(record):
    return measure_pnac(record, 25)


@pytest.mark.parametrize('count, name', [(1, LONG), (3, SHORT), (8, LONG)])
def test_pnac_over_training(measure, count, name):
    runs = {name.format(i): measure for i in range(count)}
    figure = figures.pnac_figure(runs)
    check_layout(figure, 2.4)
    axes, = figure.axes
    assert len(axes.lines) == 2 * count
    for line, field in zip(axes.lines, ['activation', 'gradient'] * count, strict=True):
        np.testing.assert_allclose(line.get_xydata(), np.stack([[13, 48], measure.mean(field)], axis=1))
    statistics = ['activationstatistic', 'gradientstatistic']
    assert names_of(figure.legends[0]) == (statistics if count == 1 else [
        *map(without_spaces, runs), *statistics])
    assert without_spaces(figure.get_suptitle()) == without_spaces(
        'Normal channels over training' + (name.format(0) if count == 1 else ''))
    if count > 1:
        assert axes.lines[0].get_linestyle() == '-' and axes.lines[1].get_linestyle() == '--'
        styles = {(line.get_color(), line.get_marker()) for line in axes.lines}
        assert len(styles) == count  # of both statistics of a run, and of no other run
        for handle, line in zip(figure.legends[0].get_lines(), axes.lines[::2], strict=False):
            assert same_color(handle.get_color(), line.get_color())
            assert handle.get_marker() == line.get_marker()


def test_images_of_one_run(record, measure):
    name = LONG.format(0)
    layers = figures.pnac_layers_figure(name, measure)
    check_layout(layers, 2.4)
    np.testing.assert_array_equal(layers.axes[0].lines[0].get_ydata(),
                                  [*measure.percent('activation').mean(axis=0)[:2], np.nan])
    assert [tick.get_text() for tick in layers.axes[0].get_xticklabels()] == [
        'patch_embed.norm', 's0.b0.norm1', 'norm3']

    density = figures.pnac_density_figure(name, measure)
    check_layout(density, 1.9)
    assert names_of(density.legends[0]) == ['start(steps1to25)', 'end(steps36to60)']

    counts = np.array([[1, 2, 3], [4, 5, 6]])
    outliers = figures.outliers_figure(name, NAMES, np.array([30, 60]), counts)
    check_layout(outliers, 2.4)
    np.testing.assert_array_equal([line.get_ydata() for line in outliers.axes[0].lines], counts)
    assert names_of(outliers.legends[0]) == ['step30', 'step60']

    history = channel_history(record, 0, 3, 'activation', 4)
    statistics = figures.statistics_figure(name, [history] * 5, 4)
    check_layout(statistics, 1.4)
    for figure, title in ((layers, 'Normal channels by layer'), (density, 'Spread of PNAC over the layers'),
                          (outliers, 'Accumulated outlier steps'),
                          (statistics, 'Statistics of single channels')):
        first, *lines = figure.get_suptitle().splitlines()
        assert first == title and without_spaces(''.join(lines)) == without_spaces(name)


def test_every_step_is_drawn_however_many_there_are(record):
    values = np.random.default_rng(0).random(20000)
    history = channel_history(record, 0, 3, 'activation', 4)._replace(steps=values, values=values, am=values, gm=values)
    axes, = figures.statistics_figure('run', [history], 4).axes
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), values)
    assert axes.get_title() == 'patch_embed.norm\nchannel 3' and axes.get_ylabel() == 'activation statistic'


def test_cka():
    names = LONG.format(1), LONG.format(2)
    cka = np.arange(12.).reshape(4, 3) / 12
    figure = figures.cka_figure(cka, [*NAMES, 'head.norm'], NAMES, *names)
    check_layout(figure, 2.7)
    axes = figure.axes[0]
    np.testing.assert_array_equal(axes.images[0].get_array(), cka)
    assert without_spaces(axes.get_xlabel()) == without_spaces(f'layers of {names[1]}')
    assert without_spaces(axes.get_ylabel()) == without_spaces(f'layers of {names[0]}')
    pairs = {' and '.join(names): np.array([1, 0.5, 0.2]), 'c and d': np.ones(3)}
    figure = figures.cka_diagonal_figure(pairs, NAMES)
    check_layout(figure, 2.4)
    assert [line.get_ydata().tolist() for line in figure.axes[0].lines] == [[1, 0.5, 0.2], [1, 1, 1]]


@pytest.mark.parametrize('count, name, lines', [(1, SHORT, 1), (8, SHORT, 3), (8, LONG, 8)])
def test_curves(count, name, lines):
    loss = np.array([[10, 2.0], [20, 1.0]])
    runs = {name.format(i): dict(loss=i + loss, **{'accuracy/top1': 10 * i + loss}) for i in range(count)}
    figure = figures.scalar_figure(runs, 'loss')
    check_layout(figure, 2.4)
    assert figure.get_suptitle() == 'loss over training'
    groups = {run: [scalars] for run, scalars in runs.items()}
    grid = curves_figure(dict(calm=groups, wild=groups), ['loss', 'accuracy/top1'],
                         LONG.format('of the recipe'), ['What a line is.'])
    check_layout(grid, 3.4)
    assert [axes.get_title() for axes in grid.axes] == [
        'calm: loss', 'calm: top-1 accuracy (%)', 'wild: loss', 'wild: top-1 accuracy (%)']
    assert grid.get_suptitle().endswith('\nWhat a line is.')
    # Short names share a line of the legend.
    assert len({round(text.get_window_extent().y0) for text in figure.legends[0].get_texts()}) == lines
    for drawn in (figure, grid):
        assert [line.get_ydata().tolist() for line in drawn.axes[0].lines] == [[i + 2, i + 1] for i in range(count)]
        assert names_of(drawn.legends[0]) == [without_spaces(run) for run in runs]
        assert drawn.axes[0].get_xlabel() == 'training step' and drawn.axes[0].get_ylabel() == 'loss'


def test_wrapped():
    assert wrapped('words that wrap', 0.8).splitlines() == ['words that', 'wrap']
    text = 'work_dirs/compare/swin'
    assert ''.join(wrapped(text, 0.8).splitlines()) == text
