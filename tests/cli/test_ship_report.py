"""What the chain says of a measurement."""
from pathlib import Path

import pytest

from mmunorm.cli.ship_report import Outcome


@pytest.mark.parametrize(('control', 'said'), [
    (None, '1.23x faster than LayerNorm'), (1.1, '1.23x faster than LayerNorm'), (1.28, 'no difference'),
    (1 / 1.28, 'no difference')])
def test_a_speed_up_that_is_smaller_than_that_of_one_file_in_two_processes(control, said):
    result = dict(control=control and dict(ratio=dict(value=control)))
    outcome = Outcome('UN', 4, 3, Path('model.tflite'), 'litert', '', {}, result, 21)
    assert outcome.speed(dict(to_baseline=dict(value=1.23, low=1.05, high=1.48))).startswith(said)
    assert outcome.speed({}) == ''
