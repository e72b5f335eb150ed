"""How an export is compared with torch, and what a failed one leaves behind; no runtime is needed."""
import copy

import numpy as np
import pytest

from mmunorm.deploy.saving import differences, file_size


def detections():
    """One picture with two objects of class 1, and room for a third."""
    dets = np.zeros((1, 3, 5), np.float32)
    dets[0, :2] = [[0, 0, 10, 10, 0.9], [20, 20, 30, 30, 0.8]]
    return dict(dets=dets, labels=np.array([[1, 1, 0]]), masks=np.zeros((1, 3, 2, 2), np.float32))


def test_equal_scores_have_no_order():
    swapped = {name: array.copy() for name, array in detections().items()}
    swapped['dets'][0, :2] = swapped['dets'][0, 1::-1]
    assert differences(detections(), swapped) == dict(scores=0, boxes=0, masks=0)


def test_the_largest_difference_counts():
    other = copy.deepcopy(detections())
    other['dets'][0, 1] += [0, 0, 2, 0, 0.125]
    other['masks'][0, 0] = 0.25
    assert differences(other, detections()) == pytest.approx(dict(scores=0.125, boxes=2, masks=0.25))


@pytest.mark.parametrize('is_extra', [False, True])
def test_a_detection_that_one_side_alone_has(is_extra):
    more = copy.deepcopy(detections())
    more['dets'][0, 2], more['labels'][0, 2] = [0, 0, 10, 10, 0.5], 2
    pair = (more, detections()) if is_extra else (detections(), more)
    assert set(differences(*pair).values()) == {np.inf}


def test_an_extra_box_of_a_class_that_is_there_is_seen():
    more = copy.deepcopy(detections())
    more['dets'][0, 2], more['labels'][0, 2] = [50, 50, 60, 60, 0.5], 1
    assert differences(more, detections())['boxes'] == 30


def test_nothing_to_compare():
    empty = {name: np.zeros_like(array) for name, array in detections().items()}
    assert differences(empty, empty) == {}
    assert differences(detections(), empty)['boxes'] == np.inf


def test_the_size_is_that_of_the_format_s_own_files(tmp_path):
    for name, size in (('m.onnx', 10), ('m.xml', 20), ('m.bin', 300)):
        (tmp_path / name).write_bytes(bytes(size))
    assert file_size(tmp_path / 'm.onnx') == 10 and file_size(tmp_path / 'm.xml') == 320
