import numpy as np

from projects.deep.deep import figures
from projects.deep.deep.layer_statistics import LayerRecord


def test_gradients_by_layer_are_those_of_the_first_step_that_has_some():
    """A head that starts at 0 hands none down in the first step."""
    gradient = np.array([[0., 0], [3, 4], [5, 6]])
    layers = LayerRecord(np.array([1, 2, 3]), ['a', 'b'], dict(
        gradient=gradient, cosine=np.full((3, 2), 0.75), active=np.ones((3, 2))))
    _, _, by_layer, distance, _ = figures.depth_figure({'run': ({}, layers)}, steps=100).axes
    assert by_layer.lines[0].get_ydata().tolist() == [3, 4]
    assert distance.lines[0].get_ydata().tolist() == [0.25, 0.25]
