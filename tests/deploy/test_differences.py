"""How the outputs of a file are compared with torch's."""
import copy

import numpy as np
import pytest

from mmunorm.deploy.saving import differences


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
    return differences(outputs, detections())


def test_partners_that_are_a_little_off():
    same = beside_torch()
    assert (same.expected, same.found, same.partners) == (80, 80, 80)
    assert same.largest == same.typical == dict(scores=0, boxes=0, masks=0)

    def change(outputs):
        outputs['dets'][..., :4] += 0.25
        outputs['dets'][0, 7, 4] /= 2
        outputs['masks'][1, 3] += 0.125

    found = beside_torch(change)
    assert found.partners == 80
    assert found.largest == pytest.approx(dict(
        scores=detections()['dets'][0, 7, 4] / 2, boxes=0.25, masks=0.125), abs=1e-4)
    assert found.typical == pytest.approx(dict(scores=0, boxes=0.25, masks=0), abs=1e-4)


def test_those_without_a_partner_are_counted_and_not_compared():
    def change(outputs):
        outputs['dets'][0, 0, 4] = 0  # not found
        outputs['labels'][0, 1] += 1  # of another class
        outputs['dets'][1, 2, :4] += 5000  # elsewhere
        outputs['dets'][1, 40] = [3000, 3000, 3010, 3010, 0.5]  # torch has not found it

    found = beside_torch(change)
    assert (found.expected, found.found, found.partners) == (80, 80, 77)
    assert max(found.largest.values()) == 0
    assert "77 of torch's 80 detections match one of the file's 80" in str(found)


def test_a_partner_is_used_once():
    one, two = (dict(dets=np.zeros((1, 2, 5)), labels=np.zeros((1, 2), int)) for _ in range(2))
    two['dets'][0, :] = [0, 0, 10, 10, 0.5]
    one['dets'][0, 0] = [0, 0, 10, 9, 0.5]
    for pair in ((one, two), (two, one)):
        found = differences(*pair)
        assert found.partners == 1 and found.largest == dict(scores=0, boxes=1)


def test_nothing_to_compare():
    empty = {name: np.zeros_like(array) for name, array in detections().items()}
    assert 'no object is detected in noise' in str(differences(empty, empty))
    lost = differences(empty, detections())
    assert (lost.expected, lost.found, lost.partners, lost.largest) == (80, 0, 0, {})
    assert "0 of torch's 80 detections" in str(lost)


def test_a_classifier():
    found = differences(dict(scores=np.array([[0.5, 0.5], [1, 0]])), dict(scores=np.array([[0.25, 0.75], [1, 0]])))
    assert found.largest == dict(scores=0.25) and found.typical == dict(scores=0.125)
    assert str(found) == 'largest difference of scores 0.25 (median 0.12)'
