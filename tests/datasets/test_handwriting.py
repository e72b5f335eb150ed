import numpy as np
import pytest
from mmengine.registry import DATASETS
from sklearn.datasets import load_digits

from mmunorm.datasets import HandwrittenDigits


def test_every_digit_is_in_one_split_as_it_was_scanned():
    splits = [HandwrittenDigits(split) for split in ('train', 'val')]
    assert [len(dataset) for dataset in splits] == [1442, 355]
    source = load_digits()
    seen = set()
    for dataset in splits:
        assert {dataset[index]['gt_label'] for index in range(10)} == set(range(10))
        for index in range(len(dataset)):
            digit = dataset[index]
            assert digit['img'].shape == (8, 8) and digit['img'].dtype == np.uint8
            assert (np.rint(digit['img'] / 255 * 16) == source.images[digit['digit_id']]).all()
            assert digit['gt_label'] == source.target[digit['digit_id']]
            seen.add(digit['digit_id'])
    assert len(seen) == 1797


def test_a_split_is_named():
    with pytest.raises(ValueError, match="split must be one of 'train', 'val', got 'test'"):
        DATASETS.build(dict(type='HandwrittenDigits', split='test'))
