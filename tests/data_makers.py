"""Tiny data sets in the real formats: COCO json, ImageNet folders, CIFAR pickles."""
import json
import pickle
from hashlib import md5

import cv2
import numpy as np
from mmdet.datasets import CocoDataset
from pycocotools import mask as mask_utils

# COCO's 80 category ids have gaps.
COCO_IDS = [i for i in range(1, 91) if i not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)]


def make_coco(root, images=2):
    """COCO 2017 in `root`: every image has a polygon, a compressed RLE and a crowd as a plain RLE."""
    rng = np.random.default_rng(0)
    height, width = 72, 96
    categories = [dict(id=i, name=name, supercategory='thing')
                  for i, name in zip(COCO_IDS, CocoDataset.METAINFO['classes'], strict=True)]
    compressed = mask_utils.frPyObjects(_plain_rle(height, width, [44, 20, 40, 40]), height, width)
    objects = (([[8.0, 8.0, 40.0, 8.0, 40.0, 40.0, 8.0, 40.0]], [8, 8, 32, 32], 0, 1),
               (dict(compressed, counts=compressed['counts'].decode()), [44, 20, 40, 40], 0, 90),
               (_plain_rle(height, width, [0, 44, 30, 20]), [0, 44, 30, 20], 1, 18))
    (root / 'annotations').mkdir(parents=True)
    for split in ('train2017', 'val2017'):
        (root / split).mkdir()
        listed, annotations = [], []
        for image_id in range(1, images + 1):
            name = f'{image_id:012d}.jpg'
            cv2.imwrite(str(root / split / name), rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
            listed.append(dict(id=image_id, file_name=name, height=height, width=width))
            for segmentation, box, crowd, category in objects:
                annotations.append(
                    dict(id=len(annotations) + 1, image_id=image_id, category_id=category, bbox=box,
                         area=box[2] * box[3], iscrowd=crowd, segmentation=segmentation))
        text = json.dumps(dict(images=listed, annotations=annotations, categories=categories))
        (root / 'annotations' / f'instances_{split}.json').write_text(text)


def _plain_rle(height, width, box):
    """Run lengths of a box as COCO writes them for crowds: zeros and ones in turns, column by column."""
    x, y, w, h = box
    counts = [x * height + y, *[h, height - h] * (w - 1), h]
    return dict(size=[height, width], counts=[*counts, height * width - sum(counts)])


def make_imagenet(root, images=2, size=(240, 260)):
    """ImageNet in `root`: 1000 class folders, of which those of val have an image in the first few alone."""
    rng = np.random.default_rng(0)
    for split in ('train', 'val'):
        for i in range(1000):
            folder = root / split / f'n{i:08d}'
            folder.mkdir(parents=True)
            if i < images:
                cv2.imwrite(str(folder / 'a.JPEG'), rng.integers(0, 256, (*size, 3), dtype=np.uint8))
            elif split == 'train':
                (folder / 'a.JPEG').hardlink_to(root / 'train/n00000000/a.JPEG')


def make_cifar(root, dataset, images=2):
    """The pickles of a CIFAR class of mmpretrain in `root`, with `images` in each of its files.

    Returns:
        dict: `train_list` and `test_list` with the MD5 sums of these files, to stand in for those of
        the published ones in a test (`monkeypatch.setattr(dataset, ...)`).
    """
    rng = np.random.default_rng(0)
    folder = root / dataset.base_folder
    folder.mkdir(parents=True)
    label_key = 'labels' if dataset.base_folder.startswith('cifar-10-') else 'fine_labels'
    tables = {}
    for table in ('train_list', 'test_list'):
        tables[table] = []
        for name, _ in getattr(dataset, table):
            content = pickle.dumps({
                'data': rng.integers(0, 256, (images, 3072), dtype=np.uint8),
                label_key: rng.integers(0, 10, images).tolist(),
            })
            (folder / name).write_bytes(content)
            tables[table].append([name, md5(content).hexdigest()])
    return tables
