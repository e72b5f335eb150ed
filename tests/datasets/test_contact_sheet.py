import json

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask

from mmunorm.datasets.contact_sheet import COLOURS, draw_contact_sheet


def test_outline_and_box_lie_around_the_mask(tmp_path):
    mask = np.zeros((64, 64), dtype=np.uint8, order='F')
    mask[20:40, 10:30] = 1
    rle = coco_mask.encode(mask)
    rle['counts'] = rle['counts'].decode()
    (tmp_path / 'ann.json').write_text(json.dumps({
        'images': [{'id': k, 'file_name': f'{k}.png'} for k in (1, 2)],
        'annotations': [{'image_id': 2, 'category_id': 7, 'bbox': [10, 20, 20, 20],
                         'segmentation': rle}],
        'categories': [{'id': 7, 'name': '6'}]
    }))  # yapf: disable
    for k in (1, 2):
        Image.new('RGB', (64, 64), (k, k, k)).save(tmp_path / f'{k}.png')
    draw_contact_sheet(tmp_path / 'ann.json', tmp_path, tmp_path / 'sheet.png', columns=2, rows=1,
                       tile=128)
    with Image.open(tmp_path / 'sheet.png') as image:
        sheet = np.asarray(image)
    assert sheet.shape == (128, 256, 3)
    assert (sheet[:, :128] == 1).all()
    tile = sheet[:, 128:]
    coloured = (tile == COLOURS[0]).all(axis=2)
    assert coloured[38:40, 22:58].all() and coloured[42:78, 60:62].all()
    assert not coloured[41:79, 21:59][1:-1, 1:-1].any()
    assert not coloured[84:].any() and not coloured[:, 64:].any()
