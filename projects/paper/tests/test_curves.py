import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from projects.paper.paper.curves import COLOURS, curves_figure, draw_curves, line_styles, read_scalars

from .logs import train, write_log


def test_validations_get_the_last_training_step(tmp_path):
    # mmengine numbers validations by epoch, or 0.
    write_log(tmp_path, '1', [train(20, 3.0), train(40, math.nan), {'accuracy/top1': 50.0, 'step': 1},
                              train(60, 1.0), {'accuracy/top1': 75.0, 'step': 0}])
    scalars = read_scalars(tmp_path)
    np.testing.assert_array_equal(scalars['loss'], [[20, 3], [40, math.nan], [60, 1]])
    np.testing.assert_array_equal(scalars['accuracy/top1'], [[40, 50], [60, 75]])
    assert 'step' not in scalars and 'iter' not in scalars


def test_a_continuation_replaces_what_it_repeats(tmp_path):
    write_log(tmp_path, '20260102', [train(25, 2.5), {'accuracy/top1': 70.0, 'step': 2}])
    write_log(tmp_path, '20260101', [train(10, 5.0), {'accuracy/top1': 20.0, 'step': 1}, train(20, 4.0),
                                     train(30, 9.0), train(40, 9.0), {'accuracy/top1': 99.0, 'step': 2}])
    scalars = read_scalars(tmp_path)
    np.testing.assert_array_equal(scalars['loss'], [[10, 5], [20, 4], [25, 2.5]])
    np.testing.assert_array_equal(scalars['accuracy/top1'], [[10, 20], [25, 70]])


def test_a_validation_right_after_resuming_and_one_that_a_continuation_drops(tmp_path):
    write_log(tmp_path, '1', [train(10, 5.0)])
    write_log(tmp_path, '2', [{'accuracy/top1': 20.0, 'step': 1}])
    np.testing.assert_array_equal(read_scalars(tmp_path)['accuracy/top1'], [[10, 20]])
    write_log(tmp_path, '3', [train(20, 3.0), train(50, 3.0), {'accuracy/top1': 20.0, 'step': 1}])
    write_log(tmp_path, '4', [train(10, 4.0)])
    scalars = read_scalars(tmp_path)
    assert list(scalars) == ['lr', 'loss']
    np.testing.assert_array_equal(scalars['loss'], [[10, 4]])


def test_a_line_that_is_half_written(tmp_path):
    write_log(tmp_path, '1', [train(10, 5.0), train(20, 4.0)])
    path = next(tmp_path.glob('*/vis_data/scalars.json'))
    path.write_text(path.read_text()[:-10])
    assert len(read_scalars(path)['loss']) == 1
    path.write_text('{"lr": 0.1, "lo\n' + path.read_text())
    with pytest.raises(ValueError, match='line 1'):
        read_scalars(tmp_path)


def test_no_log(tmp_path):
    assert read_scalars(tmp_path) == {}


def test_mean_and_band():
    axes = Figure().subplots()
    short, long = np.array([[0, 1], [10, 2], [20, math.nan]]), np.array([[0, 3], [10, 6], [20, 7.0]])
    runs = dict(LN=[dict(loss=short), dict(loss=long)], UN=[], BN=[dict(other=np.ones((1, 2)))])
    draw_curves(axes, runs, 'loss')
    line, = axes.lines
    # The first run ends at step 10: its nan is left out.
    np.testing.assert_array_equal(line.get_xydata(), [[0, 2], [10, 4], [20, 7]])
    assert line.get_label() == 'LN' and line.get_color() == COLOURS[0]
    band = axes.collections[0].get_paths()[0].vertices
    assert [10, 2] in band.tolist() and [10, 6] in band.tolist()
    assert axes.get_xlabel() == 'training step' and axes.get_ylabel() == 'loss'


def test_a_norm_has_the_same_colour_in_every_figure():
    assert line_styles(['a', 'UN', 'LN'])['UN'] == line_styles(['UN'])['UN'] == (COLOURS[1], '-')
    assert len(set(line_styles([*map(str, range(12)), 'UN', 'LN', 'BN']).values())) == 15


def test_every_label_has_its_own_style():
    runs = {str(i): [dict(loss=np.array([[0, i], [1, i]]))] for i in range(14)}
    figure = curves_figure(dict(calm=runs), ['loss'], 'title')
    lines = figure.axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 14
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(runs)
