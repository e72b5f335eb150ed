"""Scanned handwritten digits: tiny real images, for deep and narrow models."""
from __future__ import annotations

import numpy as np
from mmengine.registry import DATASETS
from mmpretrain.datasets import BaseDataset


@DATASETS.register_module()
class HandwrittenDigits(BaseDataset):
    """UCI's Optical Recognition of Handwritten Digits, bundled with scikit-learn, without downloads.

    1797 grey images of 8 x 8 pixels with bright ink; `img` is uint8 `(8, 8)`. A fifth of each class is for validation.

    Args:
        split (str): 'train' or 'val'.
        pipeline (Sequence): a pipeline that begins with a transform of `img`; there is no file to load.
        **kwargs: the other arguments of mmpretrain's BaseDataset.

    Raises:
        ValueError: `split` is neither.
    """
    METAINFO = dict(classes=tuple('0123456789'))

    def __init__(self, split: str, pipeline=(), **kwargs):
        self.split = split
        super().__init__(ann_file='', pipeline=pipeline, **kwargs)

    def load_data_list(self) -> list[dict]:
        """`img`, `gt_label` and `digit_id`, the index in scikit-learn, of each digit; the classes alternate."""
        # The import takes a second, and other data sets do not need it.
        from .digit_scenes import SPLITS, split_samples
        if self.split not in SPLITS:
            raise ValueError(f'split must be one of {", ".join(map(repr, SPLITS))}, got {self.split!r}')
        return [dict(img=np.rint(255 * digit.cells).astype(np.uint8), gt_label=digit.label, digit_id=digit.digit_id)
                for digit in split_samples(self.split, seed=0)]
