"""ExDark's annotations (arXiv 1805.11227) in the COCO format."""
from __future__ import annotations

import json
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from ..utils import write_text

CLASSES = ('Bicycle', 'Boat', 'Bottle', 'Bus', 'Car', 'Cat', 'Chair', 'Cup', 'Dog', 'Motorbike', 'People', 'Table')
SPLITS = ('train', 'val', 'test')  # 1, 2 and 3 in ExDark's list
LIST = 'imageclasslist.txt'
PICTURES, BOXES = 'ExDark', 'ExDark_Annno'  # as the archives have them


class ExDarkError(ValueError):
    """ExDark is not there as its archives hold it. The message is one line for the user."""


def convert_exdark(root: str | Path) -> dict[str, tuple[int, int]]:
    """Writes `annotations/{train,val,test}.json` under `root`.

    `root` holds what ExDark's archives do: the list `imageclasslist.txt`, whose lines are name, class, light, place and
    split, the pictures `ExDark/CLASS/NAME`, and their boxes `ExDark_Annno/CLASS/NAME.txt`, left, top, width and height.
    Category k is the k-th of `CLASSES`, from 1. Boxes are cut at the border of the picture.

    Returns:
        dict[str, tuple[int, int]]: pictures and boxes of each split.

    Raises:
        ExDarkError: a file is missing or damaged; names it.
    """
    root = Path(root)
    contents = {split: dict(images=[], annotations=[], categories=[
        dict(id=i, name=name) for i, name in enumerate(CLASSES, start=1)]) for split in SPLITS}
    for name, label, split in _listed(root / LIST):
        content = contents[split]
        path = _find(root / PICTURES / CLASSES[label - 1], name)
        width, height = _size(path)
        image = dict(id=len(content['images']) + 1, file_name=path.relative_to(root / PICTURES).as_posix(),
                     width=width, height=height)
        content['images'].append(image)
        boxes = root / BOXES / CLASSES[label - 1] / f'{name}.txt'
        for category, left, top, right, bottom in _boxes(boxes, width, height):
            box = [left, top, right - left, bottom - top]
            content['annotations'].append(dict(
                id=len(content['annotations']) + 1, image_id=image['id'], category_id=category, bbox=box,
                area=box[2] * box[3], iscrowd=0))
    (root / 'annotations').mkdir(exist_ok=True)
    for split, content in contents.items():
        write_text(root / 'annotations' / f'{split}.json', json.dumps(content))
    return {split: (len(content['images']), len(content['annotations'])) for split, content in contents.items()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding='utf-8').splitlines()
    except FileNotFoundError:
        raise ExDarkError(f'there is no {path}') from None


def _listed(path: Path):
    """Name, number of the class from 1, and split of each picture."""
    for number, line in enumerate(_lines(path), start=1):
        fields = line.split()
        if not fields or not fields[-1].isdigit():  # the header, and empty lines
            continue
        # Fields are counted from the end: a name may have spaces.
        label, split = fields[-4:-3], int(fields[-1])
        if len(fields) < 5 or not label[0].isdigit() or not 1 <= int(label[0]) <= 12 or not 1 <= split <= 3:
            raise ExDarkError(f'{path}, line {number}: must be a name, a class from 1 to 12, light, place, and a split '
                              f'from 1 to 3, got {line!r}')
        yield ' '.join(fields[:-4]), int(label[0]), SPLITS[split - 1]


def _find(folder: Path, name: str) -> Path:
    """The picture; some have another case of their suffix in the list than on the disk."""
    if (folder / name).is_file():
        return folder / name
    stem, suffix = Path(name).stem, Path(name).suffix
    for other in (suffix.lower(), suffix.upper(), suffix.capitalize()):
        if (folder / f'{stem}{other}').is_file():
            return folder / f'{stem}{other}'
    raise ExDarkError(f'there is no picture {folder / name}')


def _size(path: Path) -> tuple[int, int]:
    try:
        with Image.open(path) as picture:
            return picture.size
    except UnidentifiedImageError:
        raise ExDarkError(f'{path} is no picture, or cut off') from None


def _boxes(path: Path, width: int, height: int):
    """Category, left, top, right and bottom of each object of a file in Piotr Dollar's bbGt format, version 3."""
    for number, line in enumerate(_lines(path), start=1):
        if line.startswith('%') or not line.strip():
            continue
        label, *numbers = line.split()
        try:
            category = CLASSES.index(label) + 1
            left, top, wide, high = map(float, numbers[:4])
        except ValueError:
            raise ExDarkError(f'{path}, line {number}: must begin with one of {", ".join(CLASSES)} and four numbers, '
                              f'got {line!r}') from None
        box = max(left, 0.), max(top, 0.), min(left + wide, width), min(top + high, height)
        if box[2] > box[0] and box[3] > box[1]:
            yield category, *box
