import numpy as np
import pytest
from mmengine.registry import DATASETS

from projects.digits.digits import HandwrittenDigits
from projects.digits.digits.digit_scenes import split_samples


@pytest.mark.parametrize('split, count', [('train', 1442), ('val', 355)])
def test_digits_are_as_they_were_scanned(split, count):
    dataset = HandwrittenDigits(split)
    assert len(dataset) == count
    for digit, sample in zip(dataset, split_samples(split, seed=0), strict=True):
        assert digit['img'].dtype == np.uint8 and (np.rint(digit['img'] / 255 * 16) == 16 * sample.cells).all()
        assert (digit['gt_label'], digit['digit_id']) == (sample.label, sample.digit_id)


def test_a_split_is_named():
    with pytest.raises(ValueError, match="split must be one of 'train', 'val', got 'test'"):
        DATASETS.build(dict(type='HandwrittenDigits', split='test'))
