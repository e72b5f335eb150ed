"""The sentences of ship.py on a measurement."""
from pathlib import Path

import pytest

from ..tiny_runs import load_tool

Outcome = load_tool('ship').Outcome


@pytest.mark.parametrize(('control', 'message'), [
    (None, '1.23x faster than LayerNorm'), ((1.1, 1.05, 1.15), '1.23x faster than LayerNorm'),
    ((1.28, 1.2, 1.3), 'no difference'), ((1 / 1.28, 0.75, 0.8), 'no difference'),
    ((1., 0.8, 1.1), 'no verdict, the machine is too busy: measure again (the same file twice: 1.000 [0.800, 1.100])')])
def test_a_speed_up_that_is_smaller_than_that_of_one_file_in_two_processes(control, message):
    result = dict(control=control and dict(ratio=dict(zip(('value', 'low', 'high'), control, strict=True))))
    outcome = Outcome(4, Path('model.tflite'), 'litert', '', {}, result, {}, 100)
    assert outcome.speed(dict(to_baseline=dict(value=1.23, low=1.05, high=1.48))).startswith(message)
    assert outcome.speed({}) == ''


def row_of(model, ratio=None):
    row = dict(model=model, format='onnx', label='ONNX Runtime', error=None, metrics={'accuracy/top1': 80.}, size=2e6,
               throughput=dict(median=10.))
    return row | (dict(to_baseline=dict(value=ratio, low=ratio - 0.1, high=ratio + 0.1)) if ratio else {})


def outcome_of(models, metrics, left, images=1000):
    rows = [row_of(model, ratio) for model, ratio in models.items()]
    result = dict(rows=rows, baseline='ln', control=None, threads=1, environment=dict(cpu='a chip'))
    return Outcome(0, Path('model.onnx'), 'onnx', 'use it', metrics, result, left, images)


def test_a_chain_without_training():
    names = [f'norm{number}' for number in range(32)]
    outcome = outcome_of({'ln': None, 'ln (exact)': 1.5}, dict(exact={'accuracy/top1': 80.}), {
        'LayerNorm': (names, []), 'exact': (names[29:], names[:29])})
    assert outcome.conclusion() == [
        'ONNX Runtime on a chip, threads: 1. exact: 1.50x faster than LayerNorm [1.40, 1.60]',
        'top1 (1000 test images): exact 80.00, LayerNorm, ONNX Runtime 80.00, the file 80.00',
        'norms left: 32, 29 of them without weights (with weights: norm29, norm30, norm31), 2.0 MB', 'use it']


def test_a_conversion_and_the_exact_fold():
    top1 = {'accuracy/top1': 80.}
    outcome = outcome_of({'ln': None, 'ln (exact)': 1.5, 'un': 1.6}, dict(LayerNorm=top1, converted=top1), {
        'LayerNorm': (['a', 'b'], []), 'exact': ([], ['a', 'b']), 'UN': ([], [])})
    assert outcome.conclusion()[0] == ('ONNX Runtime on a chip, threads: 1. exact: 1.50x faster than LayerNorm '
                                       '[1.40, 1.60]; UN: 1.60x faster than LayerNorm [1.50, 1.70]')
    assert outcome.norms_left == 'norms left: 0'


def test_few_images_are_no_verdict():
    top1 = dict(exact={'accuracy/top1': 80.})
    outcome = outcome_of({'ln': None, 'ln (exact)': 1.5}, top1, {'LayerNorm': (['a'], []), 'exact': ([], ['a'])}, 12)
    assert outcome.conclusion()[1].startswith('top1 (12 test images, too few for a verdict): exact 80.00')
