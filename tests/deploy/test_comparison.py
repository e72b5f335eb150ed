"""How the outputs of a file are compared with torch's."""
import copy
import dataclasses

import numpy as np
import pytest

from mmunorm.deploy.comparison import mean_snr, signal_to_noise
from mmunorm.deploy.tasks import TASKS


def detections(number=40, seed=0):
    """Two images with as many objects of 3 classes, some of which overlap, and room for more."""
    rng = np.random.default_rng(seed)
    dets = np.zeros((2, number + 3, 5), np.float32)
    corner = rng.uniform(0, 900, (2, number, 2))
    dets[:, :number] = np.concatenate([corner, corner + rng.uniform(20, 100, corner.shape),
                                       rng.uniform(0.1, 1, (2, number, 1))], -1)
    return dict(dets=dets, labels=rng.integers(0, 3, (2, number + 3)),
                masks=rng.uniform(0, 1, (2, number + 3, 4, 4)).astype(np.float32))


def beside_torch(change=lambda outputs: None):
    """The comparison of what torch has found with the same after a change, in another order."""
    rng, outputs = np.random.default_rng(1), copy.deepcopy(detections())
    change(outputs)
    for image in range(2):
        order = rng.permutation(outputs['dets'].shape[1])
        for array in outputs.values():
            array[image] = array[image, order]
    return TASKS['detector'].differences(outputs, detections())


def test_matches_that_differ_a_little():
    same = beside_torch()
    assert (same.expected, same.found, same.matches) == (80, 80, 80)
    assert same.largest == same.median == dict(scores=0, boxes=0, masks=0)

    def change(outputs):
        outputs['dets'][..., :4] += 0.25
        outputs['dets'][0, 7, 4] /= 2
        outputs['masks'][1, 3] += 0.125

    found = beside_torch(change)
    assert found.matches == 80
    assert found.largest == pytest.approx(dict(
        scores=detections()['dets'][0, 7, 4] / 2, boxes=0.25, masks=0.125), abs=1e-4)
    assert found.median == pytest.approx(dict(scores=0, boxes=0.25, masks=0), abs=1e-4)


def test_detections_without_a_match_are_counted_and_not_compared():
    def change(outputs):
        outputs['dets'][0, 0, 4] = 0  # not found
        outputs['labels'][0, 1] += 1  # of another class
        outputs['dets'][1, 2, :4] += 5000  # elsewhere
        outputs['dets'][1, 40] = [3000, 3000, 3010, 3010, 0.5]  # torch has not found it

    found = beside_torch(change)
    assert (found.expected, found.found, found.matches) == (80, 80, 77)
    assert max(found.largest.values()) == 0
    assert "77 of torch's 80 detections match one of the file's 80" in str(found)
    assert 'compare the AP' not in str(found)
    few = dataclasses.replace(found, matches=40)
    assert 'boxes differ, so compare the AP of both: tools/deploy/test.py' in str(few)


def test_a_detection_is_matched_once():
    one, two = (dict(dets=np.zeros((1, 2, 5)), labels=np.zeros((1, 2), int)) for _ in range(2))
    two['dets'][0, :] = [0, 0, 10, 10, 0.5]
    one['dets'][0, 0] = [0, 0, 10, 9, 0.5]
    for pair in ((one, two), (two, one)):
        found = TASKS['detector'].differences(*pair)
        assert found.matches == 1 and found.largest == dict(scores=0, boxes=1)


def test_nothing_to_compare():
    empty = {name: np.zeros_like(array) for name, array in detections().items()}
    assert 'no object is detected' in str(TASKS['detector'].differences(empty, empty))
    lost = TASKS['detector'].differences(empty, detections())
    assert (lost.expected, lost.found, lost.matches, lost.largest) == (80, 0, 0, {})
    assert "0 of torch's 80 detections" in str(lost)


def test_a_classifier():
    scores = dict(scores=np.array([[0.5, 0.5], [1, 0]])), dict(scores=np.array([[0.25, 0.75], [1, 0]]))
    found = TASKS['classifier'].differences(*scores)
    assert found.largest == dict(scores=0.25) and found.median == dict(scores=0.125)
    signal, noise = np.log(3)**2 / 2 + np.log(1e30)**2 / 2, np.log(3)**2 / 2
    assert found.snr == dict(scores=pytest.approx(10 * np.log10(signal / noise)))
    assert str(found) == f'SNR of scores {found.snr["scores"]:.1f} dB'


def test_infinite_values_that_are_equal_are_no_noise():
    exact = np.float32([[1, -np.inf]])
    assert signal_to_noise(exact, exact) == np.inf
    assert signal_to_noise(exact + np.float32(0.1), exact) == pytest.approx(20, abs=1e-4)
    assert np.isnan(signal_to_noise(np.float32([[np.nan, 1]]), exact))


def test_mean_snr():
    exact = [np.full(4, 10.), np.full(2, 1.)]
    assert mean_snr([np.full(4, 10.1), np.full(2, 1.1)], exact) == pytest.approx(30)
    assert mean_snr(exact, exact) == 300


@pytest.mark.parametrize('got, exact, is_float', [
    ([[1, 2]], [[1, 2]], True), ([[1, 2.01]], [[1, 2]], False), ([[np.nan, 2]], [[1, 2]], False),
    ([[1e-8, 0]], [[0, 0]], True), ([[1e-6, 0]], [[0, 0]], False)])
def test_what_a_file_in_floating_point_may_differ(got, exact, is_float):
    assert TASKS['tensors'].differences(dict(a=np.float32(got)), dict(a=np.float32(exact))).is_within() == is_float


@pytest.mark.parametrize('lost, factor, is_float', [(0, 1, True), (6, 1, True), (12, 1, False), (0, 0.9, False)])
def test_detections_of_a_file_in_floating_point(lost, factor, is_float):
    def change(outputs):
        outputs['dets'][0, :lost, 4] = 0
        outputs['dets'][..., 4] *= factor

    assert beside_torch(change).is_within() == is_float
