import numpy as np
import pytest
from sklearn.datasets import load_digits, load_sample_images

from projects.digits.digits.digit_scenes import Sample, draw_scene, draw_single, photo_regions, split_samples
from projects.digits.digits.scenes import MIN_VISIBLE


@pytest.mark.parametrize('seed', [0, 1])
def test_splits_partition_the_samples(seed):
    train, val = split_samples('train', seed), split_samples('val', seed)
    ids = [sample.digit_id for sample in train + val]
    assert sorted(ids) == list(range(1797))
    assert len(val) == pytest.approx(1797 / 5, abs=10)
    digits = load_digits()
    for sample in train + val:
        assert sample.label == digits.target[sample.digit_id]
        assert (sample.cells == digits.images[sample.digit_id] / 16).all()
    for first in (train[:10], val[:10]):
        assert {sample.label for sample in first} == set(range(10))


def test_photo_regions_are_disjoint_parts_of_the_photos():
    pairs = zip(photo_regions('train'), photo_regions('val'), load_sample_images().images, strict=True)
    for train, val, photo in pairs:
        assert (np.concatenate([train, val], axis=1) == photo).all()


def test_scenes_are_crowded_but_readable():
    samples = split_samples('val', 0)
    counts, heights, shares = [], [], []
    for k in range(60):
        _, owner, glyphs = draw_scene(np.random.default_rng([3, k]), samples, 'val', 128)
        counts.append(len(glyphs))
        heights += [glyph.alpha.shape[0] for glyph in glyphs]
        shares += [(owner == k).sum() / glyph.mask.sum() for k, glyph in enumerate(glyphs)]
    assert set(counts) == {1, 2, 3, 4, 5}
    assert 15 <= np.percentile(heights, 5) <= 25 and 48 <= np.percentile(heights, 95) <= 62
    assert MIN_VISIBLE <= min(shares) < 0.95


@pytest.mark.parametrize('size', [16, 32, 64])
def test_single_digit_fits_even_when_it_fills_all_cells(size):
    sample = Sample(0, 0, np.ones((8, 8)))
    for seed in range(20):
        assert draw_single(np.random.default_rng(seed), sample, 'train', size).shape == (size, size, 3)
