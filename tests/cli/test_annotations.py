"""Annotation files that mmdet accepts silently, or fails on after the training."""
import codecs
import copy
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from mmdet.datasets import CocoDataset
from mmdet.evaluation import CocoMetric
from mmengine.logging import MMLogger
from PIL import Image

from mmunorm.cli.annotations import Use, check_annotations, completed_annotations
from mmunorm.utils import PreflightError

CLASSES = ('cat', 'dog', 'cow')


def content():
    """Three images of 40 x 30 pixels with an object of each class, and a crowd."""
    images = [dict(id=i, file_name=f'{i}.png', width=40, height=30) for i in (1, 2, 3)]
    annotations = []
    for image in images:
        for category in (1, 2, 3, 3):
            box = [3 * category, 2 * len(annotations) % 9, 10, 12]
            x, y, w, h = box
            annotations.append(dict(
                id=len(annotations) + 1, image_id=image['id'], category_id=category, bbox=box, area=w * h, iscrowd=0,
                segmentation=[[x, y, x + w, y, x + w, y + h, x, y + h]]))
    return dict(images=images, annotations=annotations,
                categories=[dict(id=i, name=name) for i, name in enumerate(CLASSES, 1)])


@pytest.fixture
def write(tmp_path):
    """Writes the annotation file after a change of its content; returns its path."""
    for i in (1, 2, 3):
        Image.new('RGB', (40, 30)).save(tmp_path / f'{i}.png')

    def write(change=lambda data: None):
        data = content()
        change(data)
        (tmp_path / 'a.json').write_text(json.dumps(data))
        return str(tmp_path / 'a.json')

    return write


def every(**values):
    """Sets keys of all annotations; None removes the key."""
    def change(data):
        for annotation in data['annotations']:
            for key, value in values.items():
                annotation[key] = value
                if value is None:
                    del annotation[key]
    return change


def first(of, **values):
    return lambda data: data[of][0].update(values)


def without(of, key):
    return lambda data: [one.pop(key) for one in data[of]]


def class_less(data):
    del data['categories'][0]
    data['annotations'] = [one for one in data['annotations'] if one['category_id'] != 1]


@pytest.mark.parametrize('change, error', [
    (lambda data: data['categories'].reverse(),
     "in the order 'cow', 'dog', 'cat', and metainfo.classes of the config in the order 'cat', 'dog', 'cow', from "
     'label 0 on; mmdet numbers labels in the order of the file: write both in one order'),
    (lambda data: data['categories'].insert(1, data['categories'].pop()), "'cow', 'dog', and .* from label 1 on"),
    (class_less, "its categories lack 'cat' of metainfo.classes, and the labels of the others would shift"),
    (lambda data: data['categories'].append(dict(id=4, name='dog')), "its categories name 'dog' twice"),
    (without('categories', 'name'), r"the category \{'id': 1\} has no name"),
    (without('images', 'height'), 'the image 1.png has no height'),
    (first('images', width=-1), '1 of 3 images have no valid size, such as 1.png with width -1 and height 30'),
    (first('images', id=2), 'two images have the id 2'),
    (first('images', width=30, height=40), '1.png has 40 x 30 pixels, and is annotated with width 30 and height 40'),
    (without('annotations', 'image_id'), 'annotation 1 has no image_id'),
    (without('annotations', 'category_id'), 'annotation 1 has no category_id'),
    (without('annotations', 'bbox'), 'annotation 1 has the box None'),
    (first('annotations', bbox=[math.nan, 1, 2, 3]), r'annotation 1 has the box \[nan, 1, 2, 3\]'),
    (first('annotations', bbox=[1, 1, 3]), r'annotation 1 has the box \[1, 1, 3\]'),
    (lambda data: data.pop('categories'), 'no list of categories'),
    (without('annotations', 'segmentation'), 'annotation 1 has no segmentation, and the config asks for masks'),
    (every(iscrowd='0'), "annotation 1 has iscrowd '0', which must be the number 0 or 1"),
    (first('annotations', ignore='no'), "annotation 1 has ignore 'no'"),
    (first('annotations', area='9'), "annotation 1 has the area '9', which must be a number"),
    (lambda data: data['annotations'].clear(), 'it has no objects'),
    (every(bbox=[50, 5, 9, 9]), '12 of 12 objects are left out: 12 outside of their image, the first is annotation 1'),
    (every(image_id='1'), '12 of an image that the file does not list'),
    (every(category_id='1'), '12 of a category that the file does not list'),
    (first('categories', id=2), 'two categories have the id 2'),
    (first('images', file_name=1), 'the file_name of image 1 is no text'),
    (first('images', file_name='a\\1.png'), r'1 of 3 images are missing, such as /.*/a\\1.png'),
    (every(iscrowd=1), 'all of its objects are crowds'),
    (every(bbox=[20, 12, 30, 20]), 'seem to be x1, y1, x2, y2: read as .*, 12 of 12 leave their image'),
    (every(bbox=[0, 0, 1, 1]), 'its boxes are normalized: no number is above 1'),
    (first('annotations', segmentation=[5, 5, 9, 5, 9, 9]), r'annotation 1 has the segmentation \[5, .* polygons'),
    (first('annotations', segmentation=[[[5, 5], [9, 5], [9, 9]]]), 'polygons .* of finite numbers'),
    (first('annotations', segmentation=[['5', '5', '9', '5', '9', '9']]), 'polygons .* of finite numbers'),
    (first('annotations', segmentation=[[5, 5, 9, 5, 9, math.nan]]), 'polygons .* of finite numbers'),
    (first('annotations', segmentation=[[5, 5, 9, 5, 9, 9, 5]]), 'polygons .* of finite numbers'),
    (first('annotations', segmentation=dict(counts='6:n0')), r'an RLE with size None .* height and width \[30, 40\]'),
    (first('annotations', segmentation=dict(counts=[9, 9], size=[30, 40])), r'and counts \[9, 9\]'),
    (every(segmentation=[[5, 5, 9, 9]]), '12 without a polygon of three points'),
    (every(segmentation=dict(counts=[1200], size=[30, 40])), '12 with a segmentation that is empty or outside of'),
    (every(segmentation=[[100, 100, 120, 100, 120, 120]]), 'with a segmentation that is empty or outside of'),
])
def test_invalid_annotations_are_one_line(change, error, write, tmp_path):
    path = write(change)
    with pytest.raises(PreflightError, match=f'^the annotation file {path} cannot be used: .*{error}.*\\.$') as caught:
        check_annotations(path, [Use(CLASSES, str(tmp_path), masks=True)])
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('damage, message', [
    (lambda text: text[:500], 'JSONDecodeError: '), (lambda text: b'[]', 'it is no JSON object'),
    (lambda text: codecs.BOM_UTF8 + text, 'JSONDecodeError: Unexpected UTF-8 BOM'),
    (lambda text: b'{"\xff": 1}', 'UnicodeDecodeError')])
def test_a_damaged_file_is_named(damage, message, write):
    path = Path(write())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(PreflightError, match=f'^the annotation file {path} cannot be used: {message}') as caught:
        check_annotations(str(path), [Use(CLASSES)])
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('change, use', [
    (lambda data: None, Use(CLASSES, masks=True)),
    (lambda data: data['categories'].insert(1, dict(id=9, name='emu')), Use(CLASSES)),  # more than the config has
    (without('annotations', 'segmentation'), Use(CLASSES)),
    (lambda data: data['categories'].reverse(), Use()),  # of a config that names a file of classes
    (lambda data: data['annotations'].clear(), Use(CLASSES, objects=False)),
    (without('annotations', 'iscrowd'), Use(CLASSES)), (without('annotations', 'id'), Use(CLASSES)),
    (first('annotations', iscrowd=True), Use(CLASSES)),
    (first('annotations', ignore=1, bbox=None), Use(CLASSES)),
    (every(iscrowd=1), Use(CLASSES, objects=False)), (first('annotations', iscrowd=1), Use(CLASSES)),
    (every(bbox=[0, 0, 40, 30]), Use(CLASSES)), (every(bbox=[5, 3, 36, 28.5]), Use(CLASSES)),  # rounded, centred
    (first('annotations', segmentation=[[5, 5, 9, 9], [5, 5, 9, 5, 9, 9]]), Use(CLASSES, masks=True)),  # a line is none
    (first('annotations', bbox=[3, 0, 10.9, 12], segmentation=[[13.95, 0, 13.99, 0, 13.99, 9]]), Use(masks=True)),
    (first('annotations', segmentation=dict(size=[30, 40], counts=[155, 15, 1030])), Use(CLASSES, masks=True)),
    (first('annotations', segmentation=dict(size=[30, 40], counts='k4?Yg0')), Use(CLASSES, masks=True)),
    (every(segmentation=[[5, 5, 9, 9, 5]]), Use(CLASSES)),  # boxes alone are read
])
def test_valid_annotations(change, use, write):
    assert check_annotations(write(change), [use]) == []


@pytest.mark.parametrize('change', [
    first('annotations', bbox=[50, 5, 9, 9]), first('annotations', bbox=[5, -9, 9, 9]),
    first('annotations', bbox=[5, 5, -7, 9]), first('annotations', bbox=[5, 5, 0.5, 9]), first('annotations', area=0),
    first('annotations', image_id=7), first('annotations', category_id=7), first('annotations', category_id='1')])
def test_objects_that_mmdet_drops_are_counted(change, write):
    path = write(change)
    warning, = check_annotations(path, [Use(CLASSES)])
    assert warning.startswith(f'{path}: 1 of 12 objects are left out: 1 ') and 'the first is annotation 1.' in warning
    dataset = CocoDataset(ann_file=path, metainfo=dict(classes=CLASSES), data_prefix=dict(img=''))
    assert sum(len(dataset.get_data_info(i)['instances']) for i in range(3)) == 11


def test_boxes_that_leave_their_image_are_warned_of(write):
    warning, = check_annotations(write(every(bbox=[30, 20, 100, 80])), [Use(CLASSES)])
    assert '12 of 12 boxes leave their image by more than 5 %; they must be x, y, width, height' in warning


def test_a_turned_photograph_has_the_size_that_it_is_loaded_with(write, tmp_path):
    path, exif = write(first('images', width=30, height=40)), Image.Exif()
    exif[274] = 6  # a quarter to the right
    stored = Use(CLASSES, str(tmp_path), loading=('color_ignore_orientation', 'cv2'))
    Image.new('RGB', (40, 30)).save(tmp_path / '1.png', exif=exif)
    assert check_annotations(path, [Use(CLASSES, str(tmp_path))]) == []
    with pytest.raises(PreflightError, match='1.png has 40 x 30 pixels as it is loaded, .* width 30 and height 40'):
        check_annotations(path, [stored])
    path = write()  # the size of the file
    with pytest.raises(PreflightError, match='1.png has 30 x 40 pixels as it .* turns it: annotate it as it is shown'):
        check_annotations(path, [Use(CLASSES, str(tmp_path))])
    assert check_annotations(path, [stored]) == []
    Image.new('RGB', (50, 30)).save(tmp_path / '2.png')
    with pytest.raises(PreflightError, match='2.png has 50 x 30 pixels'):
        check_annotations(path, [stored])


def test_images_that_are_read_must_be_there(write, tmp_path):
    (tmp_path / '3.png').rename(tmp_path / 'sub.png')
    used, path = Use(CLASSES, str(tmp_path)), write()
    with pytest.raises(PreflightError, match=f'1 of 3 images are missing, such as {tmp_path}/3.png'):
        check_annotations(path, [used])
    path = write(lambda data: data.update(annotations=data['annotations'][:8]))
    assert check_annotations(path, [dataclasses.replace(used, empty=False)]) == []
    with pytest.raises(PreflightError, match='1 of 3 images are missing'):
        check_annotations(path, [used])
    path = write(lambda data: data['images'][2].update(file_name=f'{tmp_path}/sub.png'))
    assert check_annotations(path, [used]) == []


def evaluated(path, kinds):
    """The labels that a data set reads from a file, and the scores of predictions against it."""
    dataset = CocoDataset(ann_file=path, metainfo=dict(classes=CLASSES), data_prefix=dict(img=''))
    infos = [dataset.get_data_info(i) for i in range(len(dataset))]
    metric = CocoMetric(path, metric=kinds)
    metric.dataset_meta = dataset.metainfo
    for info in infos:
        boxes = torch.tensor([instance['bbox'] for instance in info['instances']]) + 1.0
        masks = torch.zeros(len(boxes), 30, 40, dtype=torch.bool)
        for mask, (x1, y1, x2, y2) in zip(masks, boxes.long().tolist(), strict=True):
            mask[y1:y2, x1:x2] = True
        found = dict(bboxes=boxes, scores=torch.linspace(0.9, 0.1, len(boxes)), masks=masks,
                     labels=torch.tensor([instance['bbox_label'] for instance in info['instances']]))
        metric.process({}, [dict(pred_instances=found, img_id=info['img_id'], ori_shape=(30, 40))])
    return infos, metric.compute_metrics(metric.results)


@pytest.mark.parametrize('change', [
    without('annotations', 'iscrowd'), without('annotations', 'area'), without('annotations', 'id'), every(id=1),
    lambda data: [one.update(id=i) for i, one in enumerate(data['annotations'])]])
@pytest.mark.usefixtures('in_a_folder')
def test_missing_keys_are_completed(change, write):
    MMLogger.get_instance('mmengine')
    infos, scores = evaluated(write(), ['bbox', 'segm'])
    assert 0.3 < scores['bbox_mAP'] < 0.9
    path = write(change)
    warnings = check_annotations(path, [Use(CLASSES, masks=True)])
    data = content()
    change(data)
    assert len(warnings) == ('area' not in data['annotations'][0])
    assert all('no `area`; it is computed from their boxes' in warning for warning in warnings)
    with completed_annotations():
        found, filled = evaluated(path, ['bbox', 'segm'])
    assert filled == scores
    assert [info['instances'] for info in found] == [info['instances'] for info in infos]


def test_ids_that_are_right_stay(tmp_path):
    data = content()
    for one in data['annotations']:
        one['id'] += 100
    expected = copy.deepcopy(data['annotations'])
    (tmp_path / 'a.json').write_text(json.dumps(data))
    before = CocoDataset.COCOAPI.createIndex
    with completed_annotations():
        assert CocoDataset.COCOAPI(str(tmp_path / 'a.json')).dataset['annotations'] == expected
    assert CocoDataset.COCOAPI.createIndex is before
