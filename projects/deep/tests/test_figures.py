import numpy as np

from projects.deep.deep import figures
from projects.deep.deep.layer_statistics import LayerRecord


def test_gradients_by_layer_are_those_of_the_first_step_that_has_some():
    """A head with zero weights passes no gradient in the first step."""
    gradient = np.array([[0., 0], [3, 4], [5, 6]])
    layers = LayerRecord(np.array([1, 2, 3]), ['a', 'b'], dict(
        gradient=gradient, cosine=np.full((3, 2), 0.75), active=np.ones((3, 2))))
    _, _, by_layer, distance, _ = figures.depth_figure({'run': ({}, layers)}, steps=100).axes
    assert by_layer.lines[0].get_ydata().tolist() == [3, 4]
    assert distance.lines[0].get_ydata().tolist() == [0.25, 0.25]


def test_quality_against_depth_has_a_panel_for_each_scheme():
    quality = figures.Quality
    figure = figures.quality_figure({
        ('PreNorm', 'LN'): {2: quality(50., 1.5, 0), 4: quality(None, None, 1)},
        ('PreNorm', 'UN'): {2: quality(60., None, 0), 4: quality(55., None, 0)},
        ('PostNorm', 'LN'): {2: quality(None, None, 2)}}, 'accuracy/top1')
    assert [axes.get_title() for axes in figure.axes] == ['PreNorm', 'PostNorm']
    pre, post = figure.axes
    assert [line.get_xydata().tolist() for line in pre.lines if line.get_marker() == '.'] == [
        [[2, 50]], [[2, 60], [4, 55]]]
    assert [line.get_xdata().tolist() for axes in (pre, post) for line in axes.lines if line.get_marker() == 'x'] == [
        [4], [2]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ['LN', 'UN', 'LN: diverged']
