"""ExDark's annotations (arXiv 1805.11227) in COCO format."""
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from mmdet.datasets import CocoDataset
from mmengine.registry import DATASETS
from PIL import Image, UnidentifiedImageError

from mmunorm.utils import PreflightError, write_text

CLASSES = ('Bicycle', 'Boat', 'Bottle', 'Bus', 'Car', 'Cat', 'Chair', 'Cup', 'Dog', 'Motorbike', 'People', 'Table')
SPLITS = ('train', 'val', 'test')  # 1, 2 and 3 in ExDark's list
LIST = 'imageclasslist.txt'
IMAGES, BOXES = 'ExDark', 'ExDark_Annno'  # as the archives have them


@DATASETS.register_module()
class ExDarkDataset(CocoDataset):
    """ExDark as written by :func:`convert_exdark`."""
    METAINFO = dict(classes=CLASSES)


def convert_exdark(root: str | Path) -> dict[str, tuple[int, int]]:
    """Writes `annotations/{train,val,test}.json` under `root`.

    `root` has the content of ExDark's archives: the list `imageclasslist.txt`, whose lines are name, class, light,
    place and split, the images `ExDark/CLASS/NAME`, and their boxes `ExDark_Annno/CLASS/NAME.txt`, left, top, width and
    height. Category k is the k-th of `CLASSES`, from 1. Boxes are cut at the border of the image.

    Returns:
        dict[str, tuple[int, int]]: images and boxes of each split.

    Raises:
        PreflightError: a file is missing or damaged.
    """
    root = Path(root)
    contents = {split: dict(images=[], annotations=[], categories=[
        dict(id=i, name=name) for i, name in enumerate(CLASSES, start=1)]) for split in SPLITS}
    for name, label, split in _listed(root / LIST):
        images, annotations = contents[split]['images'], contents[split]['annotations']
        path = _find(root / IMAGES / label, name)
        try:
            with Image.open(path) as image:
                width, height = image.size
        except UnidentifiedImageError:
            raise PreflightError(f'{path} is not an image, or truncated.') from None
        images.append(dict(id=len(images) + 1, file_name=path.relative_to(root / IMAGES).as_posix(), width=width,
                           height=height))
        for category, box in _boxes(root / BOXES / label / f'{name}.txt', width, height):
            annotations.append(dict(id=len(annotations) + 1, image_id=len(images), category_id=category, bbox=box,
                                    area=box[2] * box[3], iscrowd=0))
    if not any(content['images'] for content in contents.values()):
        raise PreflightError(f'{root / LIST} lists no image.')
    (root / 'annotations').mkdir(exist_ok=True)
    for split, content in contents.items():
        write_text(root / 'annotations' / f'{split}.json', json.dumps(content))
    return {split: (len(content['images']), len(content['annotations'])) for split, content in contents.items()}


def _numbered_lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a file, each with its location for an error."""
    try:
        lines = path.read_text(encoding='utf-8').splitlines()
    except FileNotFoundError:
        raise PreflightError(f'there is no {path}.') from None
    for number, line in enumerate(lines, start=1):
        yield f'{path}, line {number}', line


def _listed(path: Path) -> Iterator[tuple[str, str, str]]:
    """Name, class and split of each image."""
    for location, line in _numbered_lines(path):
        fields = line.split()
        if not fields or location.endswith(', line 1') and not fields[-1].isdigit():  # the header
            continue
        # Fields are counted from the end: a name may have spaces.
        label, split = fields[-4:-3], fields[-1]
        if len(fields) < 5 or not label[0].isdigit() or not 1 <= int(label[0]) <= 12 or split not in ('1', '2', '3'):
            raise PreflightError(f'{location}: must be a name, a class from 1 to 12, light, place, and a split from 1 '
                                 f'to 3, got {line!r}.')
        yield ' '.join(fields[:-4]), CLASSES[int(label[0]) - 1], SPLITS[int(split) - 1]


def _find(folder: Path, name: str) -> Path:
    """The image; the case of some suffixes differs between the list and the disk."""
    path = folder / name
    for suffix in (path.suffix, path.suffix.lower(), path.suffix.upper(), path.suffix.capitalize()):
        if path.with_suffix(suffix).is_file():
            return path.with_suffix(suffix)
    raise PreflightError(f'there is no image {path}.')


def _boxes(path: Path, width: int, height: int) -> Iterator[tuple[int, list[float]]]:
    """Category, and left, top, width and height, of each object of a file in Piotr Dollar's bbGt format, version 3."""
    for location, line in _numbered_lines(path):
        if line.startswith('%') or not line.strip():
            continue
        label, *numbers = line.split()
        try:
            category = CLASSES.index(label) + 1
            left, top, wide, high = map(float, numbers[:4])
        except ValueError:
            raise PreflightError(f'{location}: must begin with one of {", ".join(CLASSES)} and four numbers, got '
                                 f'{line!r}.') from None
        right, bottom = min(left + wide, width), min(top + high, height)
        left, top = max(left, 0.), max(top, 0.)
        if right > left and bottom > top:
            yield category, [left, top, right - left, bottom - top]
