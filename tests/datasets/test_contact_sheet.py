import json

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask

from mmunorm.datasets.contact_sheet import draw_contact_sheet


def test_mask_and_box_lie_where_the_object_is(tmp_path):
    mask = np.zeros((64, 64), dtype=np.uint8, order='F')
    mask[20:40, 10:30] = 1
    rle = coco_mask.encode(mask)
    rle['counts'] = rle['counts'].decode()
    (tmp_path / 'ann.json').write_text(json.dumps({
        'images': [{'id': k, 'file_name': f'{k}.png', 'width': 64, 'height': 64} for k in (1, 2)],
        'annotations': [{'id': 1, 'image_id': 2, 'category_id': 7, 'bbox': [10, 20, 20, 20],
                         'segmentation': rle}],
        'categories': [{'id': 7, 'name': '6'}]
    }))  # yapf: disable
    for k in (1, 2):
        Image.new('RGB', (64, 64), (k, k, k)).save(tmp_path / f'{k}.png')
    draw_contact_sheet(tmp_path / 'ann.json', tmp_path, tmp_path / 'sheet.png')
    with Image.open(tmp_path / 'sheet.png') as image:
        sheet = np.asarray(image)
    assert sheet.shape == (3 * 256, 4 * 256, 3)
    assert (sheet[:256, :256] == 1).all() and not sheet[256:].any() and not sheet[:, 512:].any()
    tile = sheet[:256, 256:512]
    untouched = (tile == 2).all(axis=2)
    red = (tile[..., 0] > 50) & (tile[..., 1] < 60)
    assert red[120:152, 48:112].all() and (tile[120:152, 48:112] == tile[140, 80]).all()  # the mask, evenly tinted
    assert (tile[80:160, 40] == (255, 80, 80)).all()  # the box
    assert untouched[168:].all() and untouched[:, 128:].all() and untouched[:60, :32].all()
