"""Pairs of images for image-to-image models: a data set of two folders, and pipeline transforms of both images."""
from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import cv2
import mmcv
import numpy as np
import torch
from mmcv.transforms import BaseTransform
from mmengine.dataset import BaseDataset
from mmengine.registry import DATASETS, TRANSFORMS
from mmengine.structures import BaseDataElement

from mmunorm.utils import IMAGE_SUFFIXES, LocalError, PreflightError


@DATASETS.register_module()
class PairDataset(BaseDataset):
    """The images of a folder, each with its target from another folder.

    The images of a pair have the same name, without suffix; several images may share a target.

    Args:
        data_prefix (dict): the folders, `dict(img=..., target=...)`, in `data_root`.
        rename (Sequence[str], optional): a regular expression and its replacement, which convert the name of an image
            to that of its target, both without suffix: `('^low', 'normal')` for LOL-V2. Defaults to None.
        **kwargs: the other arguments of mmengine's BaseDataset. The `pipeline` begins with :class:`LoadPair`.

    Raises:
        PreflightError: a folder does not exist, there is no image, or an image has no target.
    """

    def __init__(self, data_prefix: dict, rename: Sequence[str] | None = None, **kwargs):
        self.rename = rename
        super().__init__(data_prefix=data_prefix, **kwargs)

    def load_data_list(self) -> list[dict]:
        """`img_path` and `target_path` of each pair, in the order of the names."""
        sources, targets = (_images_in(self.data_prefix[key]) for key in ('img', 'target'))
        by_name = {path.stem: path for path in targets}
        pairs = []
        for path in sources:
            name = re.sub(*self.rename, path.stem) if self.rename else path.stem
            if name not in by_name:
                raise PreflightError(f'{path} has no target: no image {name} in {self.data_prefix["target"]}.')
            pairs.append(dict(img_path=str(path), target_path=str(by_name[name])))
        return pairs


# By the name of a folder in the path.
_SOURCES = {
    'lol_v1': 'get LOLdataset.zip from https://daooshee.github.io/BMVC2018website/ and unpack its our485 and eval15 in '
              '{folder}',
    'lol_v2': 'get LOL-v2 from https://github.com/flyywh/CVPR-2020-Semi-Low-Light and put its Real_captured in '
              '{folder}',
    'exposure': 'get the data of https://github.com/mahmoudnafifi/Exposure_Correction and put training and testing in '
                '{folder}',
    'digits_dark': 'make it with `python projects/low_light/tools/make_dark.py`',
}


def _images_in(folder: str) -> list[Path]:
    paths = sorted(Path(folder).iterdir()) if Path(folder).is_dir() else []
    if images := [path for path in paths if path.suffix.lower() in IMAGE_SUFFIXES]:
        return images
    parts = Path(folder).parts
    advice = [source.format(folder=Path(*parts[:parts.index(name) + 1])) for name, source in _SOURCES.items()
              if name in parts]
    raise PreflightError(f'there is no image in the folder {folder}{"".join(f"; {text}" for text in advice)}.')


@TRANSFORMS.register_module()
class LoadPair(BaseTransform):
    """Reads `img` and `target` as uint8 BGR `(h, w, 3)`, also images in grey, in 16 bits or with transparency.

    An image without `target_path`, as of `tools/convert_norms.py --images`, is read alone.
    """

    def transform(self, results: dict) -> dict:
        """Adds the images.

        Raises:
            LocalError: an image cannot be read, or their sizes differ.
        """
        results['img'] = _read(results['img_path'])
        if 'target_path' not in results:
            return results
        results['target'] = _read(results['target_path'])
        if results['img'].shape != results['target'].shape:
            sizes = [f'{image.shape[1]} x {image.shape[0]}' for image in (results['img'], results['target'])]
            raise LocalError(f'{results["img_path"]} has {sizes[0]} pixels and its target {results["target_path"]} '
                             f'{sizes[1]}: both must have the same size.')
        return results


def _read(path: str) -> np.ndarray:
    try:
        image = mmcv.imfrombytes(Path(path).read_bytes())
    except (OSError, cv2.error):
        image = None
    if image is None:
        raise LocalError(f'cannot use the image {path}: it is missing, empty, truncated, or not an image.')
    return image


@TRANSFORMS.register_module()
class RandomCropPair(BaseTransform):
    """Crops the same random part of both images; a side that is smaller than the crop is not cropped.

    Args:
        crop_size (Sequence[int]): height and width.
    """

    def __init__(self, crop_size: Sequence[int]):
        self.crop_size = tuple(crop_size)

    def transform(self, results: dict) -> dict:
        shape = results['img'].shape[:2]
        sides = [min(side, most) for side, most in zip(self.crop_size, shape, strict=True)]
        top, left = (np.random.randint(most - side + 1) for side, most in zip(sides, shape, strict=True))
        for key in ('img', 'target'):
            results[key] = results[key][top:top + sides[0], left:left + sides[1]]
        return results


@TRANSFORMS.register_module()
class RandomFlipPair(BaseTransform):
    """Flips both images along each axis with a probability of 0.5."""

    def transform(self, results: dict) -> dict:
        for axis in (0, 1):
            if np.random.rand() < 0.5:
                for key in ('img', 'target'):
                    results[key] = np.flip(results[key], axis)
        return results


@TRANSFORMS.register_module()
class PackPair(BaseTransform):
    """Returns `inputs`, uint8 BGR `(3, h, w)`, and `data_samples` with its `target`, if it has one, and the path."""

    def transform(self, results: dict) -> dict:
        tensors = {key: torch.from_numpy(np.ascontiguousarray(results[key].transpose(2, 0, 1)))
                   for key in ('img', 'target') if key in results}
        image = tensors.pop('img')
        return dict(inputs=image, data_samples=BaseDataElement(metainfo=dict(img_path=results['img_path']), **tensors))
