"""Data that OpenMMLab accepts silently, or fails on in the middle of a run: COCO files, classes, folders, images."""
import codecs
import json
import math
import os
import re
from pathlib import Path

import pytest
from mmdet.datasets import CocoDataset
from mmengine.config import Config
from PIL import Image

from mmunorm.cli.data_checks import check_annotations, check_classes, check_data, classes_of
from mmunorm.engine import calibration
from mmunorm.utils import PreflightError

from .. import data_makers

CLASSES = ('cat', 'dog', 'cow')
VAL = 'coco/annotations/instances_val2017.json'


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# COCO files


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


def dataset_of(path, classes=CLASSES, masks=False, loader=None):
    """A data set of the file and of images beside it, or without `loader` of the file alone."""
    images = [] if loader is None else [dict(type='LoadImageFromFile', **loader)]
    return dict(type='CocoDataset', ann_file=path, metainfo=dict(classes=classes), data_prefix=dict(img=str(
        Path(path).parent)), pipeline=[*images, dict(type='LoadAnnotations', with_mask=masks)])


def refusal(dataset):
    with pytest.raises(PreflightError) as caught:
        check_data(config(dataset), ['train'])
    assert '\n' not in str(caught.value) and dataset['ann_file'] in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize('change, error', [
    (without('categories', 'name'), "KeyError: name"),
    (first('images', id=2), 'two images have the id 2'),
    (first('images', width=30, height=40), '1.png has 40 x 30 pixels, and is annotated with width 30 and height 40'),
    (without('annotations', 'bbox'), 'KeyError: bbox'), (without('annotations', 'area'), 'KeyError: area'),
    (first('annotations', bbox=[math.nan, 1, 2, 3]), r'annotation 1 has the box \[nan, 1, 2, 3\], area 120; a box is'),
    (first('annotations', bbox=[1, 1, 3]), r'annotation 1 has the box \[1, 1, 3\]'),
    (first('annotations', bbox=['1', '1', '3', '3']), 'TypeError'), (first('annotations', area='9'), 'TypeError'),
    (without('annotations', 'segmentation'), 'annotation 1 has no segmentation, and the config asks for masks'),
    (first('annotations', id=2), 'two annotations have the id 2'),
    (lambda data: data['annotations'].clear(), 'has no objects'),
    (every(bbox=[50, 5, 9, 9]), '12 of 12 objects are left out: 12 outside of their image, .* such as annotation 1'),
    (every(image_id='1'), '12 of an image that the file does not list'),
    (every(category_id='1'), '12 of a category that the file does not list'),
    (first('categories', id=2), 'two categories have the id 2'),
    (first('images', file_name='a\\1.png'), r'1 of 3 images cannot be used, such as /.*/a\\1.png: no such file'),
    (every(iscrowd=1), 'all of its objects are crowds'),
    (every(bbox=[20, 12, 30, 20]), 'seem to be x1, y1, x2, y2: read as .*, 12 of 12 leave their image'),
    (every(bbox=[0, 0, 1, 1]), 'its boxes are normalized: no number is above 1'),
    (first('annotations', segmentation=[5, 5, 9, 5, 9, 9]), 'TypeError'),
    (first('annotations', segmentation=[[[5, 5], [9, 5], [9, 9]]]), 'TypeError'),
    (first('annotations', segmentation=[['5', '5', '9', '5', '9', '9']]), 'TypeError'),
    (first('annotations', segmentation=[[5, 5, 9, 5, 9, math.nan]]), 'annotation 1 has a segmentation with NaN'),
    (first('annotations', segmentation=dict(counts='6:n0')), r'annotation 1 has an RLE of another size .* 40 x 30'),
    (first('annotations', segmentation=dict(counts=[9, 9], size=[30, 40])), 'annotation 1 has an RLE of another size'),
    (first('annotations', segmentation=dict(counts=[-9, 1209], size=[30, 40])), 'has an RLE of another size'),
    (every(segmentation=[[5, 5, 9, 9]]), '12 with a segmentation that mmdet cannot use, or outside of their box'),
    (every(segmentation=[[5, 5, 9, 5, 9, 9, 5]]), '12 with a segmentation that mmdet cannot use'),
    (every(segmentation=dict(counts=[1200], size=[30, 40])), '12 with a segmentation that mmdet cannot use'),
    (every(segmentation=[[100, 100, 120, 100, 120, 120]]), '12 with a segmentation that mmdet cannot use'),
])
def test_invalid_annotations_are_one_line(change, error, write):
    assert re.search(error, refusal(dataset_of(write(change), masks=True, loader={})))


@pytest.mark.parametrize('change, error', [
    (lambda data: data['categories'].reverse(),
     "('cow', 'dog', 'cat') are 'cow', 'dog', 'cat' from label 0 on, and metainfo.classes of the config 'cat', 'dog', "
     "'cow'; labels are numbered in the order of names"),
    (lambda data: data['categories'].insert(1, data['categories'].pop()), "are 'cow', 'dog' from label 1 on, and"),
    (class_less, "are 'dog', 'cow' from label 0 on, and metainfo.classes of the config 'cat', 'dog', 'cow'"),
    (lambda data: data['categories'].append(dict(id=4, name='dog')), "are 'dog' from label 3 on, and metainfo.classes "
     'of the config no more'),
    (lambda data: [one.update(name='x') for one in data['categories']], "('x', 'x', 'x') are no more from label 0 on")])
def test_categories_have_the_order_of_the_classes(change, error, write):
    assert error in refusal(dataset_of(write(change)))


@pytest.mark.parametrize('damage, message', [
    (lambda text: text[:500], 'JSONDecodeError: '), (lambda text: b'[]', 'TypeError: '),
    (lambda text: codecs.BOM_UTF8 + text, 'JSONDecodeError: Unexpected UTF-8 BOM'),
    (lambda text: b'{"\xff": 1}', 'UnicodeDecodeError')])
def test_a_damaged_file_is_named(damage, message, write):
    path = Path(write())
    path.write_bytes(damage(path.read_bytes()))
    assert refusal(dataset_of(str(path))).startswith(f'the annotation file {path} cannot be used: {message}')


@pytest.mark.parametrize('change, use', [
    (lambda data: None, dict(masks=True)),
    (lambda data: data['categories'].insert(1, dict(id=9, name='emu')), {}),  # more than the config has
    (without('annotations', 'segmentation'), {}),
    (lambda data: data['annotations'].clear(), dict(needs_objects=False)),
    (first('annotations', ignore=1, bbox=None), {}),
    (every(iscrowd=1), dict(needs_objects=False)), (first('annotations', iscrowd=1), {}),
    (every(bbox=[0, 0, 40, 30]), {}), (every(bbox=[5, 3, 36, 28.5]), {}),  # rounded, centred
    (first('annotations', segmentation=[[5, 5, 9, 9], [5, 5, 9, 5, 9, 9]]), dict(masks=True)),  # a line is none
    (first('annotations', bbox=[3, 0, 10.9, 12], segmentation=[[13.95, 0, 13.99, 0, 13.99, 9]]), dict(masks=True)),
    (first('annotations', segmentation=dict(size=[30, 40], counts=[155, 15, 1030])), dict(masks=True)),
    (first('annotations', segmentation=dict(size=[30, 40], counts='k4?Yg0')), dict(masks=True)),
    (every(segmentation=[[5, 5, 9, 9, 5]]), {}),  # boxes alone are read
])
def test_valid_annotations(change, use, write, capsys):
    path = write(change)
    check_annotations(path, json.loads(Path(path).read_text()), CLASSES, **{
        **dict(masks=False, needs_objects=True), **use})
    assert capsys.readouterr().err == ''


def test_objects_that_mmdet_drops_are_counted(write, capsys):
    dropped = [dict(bbox=[50, 5, 9, 9]), dict(bbox=[5, -9, 9, 9]), dict(bbox=[5, 5, -7, 9]), dict(bbox=[5, 5, 0.5, 9]),
               dict(area=0), dict(image_id=7), dict(category_id=7), dict(category_id='1')]
    for values in dropped:
        path = write(first('annotations', **values))
        check_data(config(dataset_of(path)), ['train'])
        warning = capsys.readouterr().err
        assert warning.startswith(f'warning: {path}: 1 of 12 objects are left out: 1 '), values
        assert warning.endswith('such as annotation 1.\n')
    path = write(lambda data: [one.update(values) for one, values in zip(data['annotations'], dropped, strict=False)])
    dataset = CocoDataset(ann_file=path, metainfo=dict(classes=CLASSES), data_prefix=dict(img=''))
    assert sum(len(dataset.get_data_info(i)['instances']) for i in range(3)) == 12 - len(dropped)


def test_boxes_that_leave_their_image_are_warned_of(write, capsys):
    check_data(config(dataset_of(write(every(bbox=[30, 20, 100, 80])))), ['train'])
    assert '12 of 12 boxes leave their image by more than 5 %; they must be x, y, width' in capsys.readouterr().err


def test_a_turned_photograph_has_the_size_that_it_is_loaded_with(write, tmp_path):
    path, exif = write(first('images', width=30, height=40)), Image.Exif()
    exif[274] = 6  # a quarter to the right
    shown, stored = (dataset_of(path, loader=loader) for loader in ({}, dict(color_type='color_ignore_orientation')))
    Image.new('RGB', (40, 30)).save(tmp_path / '1.png', exif=exif)
    check_data(config(shown), ['train'])
    assert re.search('1.png has 40 x 30 pixels, turned by EXIF unless .* width 30 and height 40', refusal(stored))
    write()  # the size of the file
    assert '1.png has 30 x 40 pixels, turned by EXIF unless it is loaded with color_type=' in refusal(shown)
    check_data(config(stored), ['train'])
    Image.new('RGB', (50, 30)).save(tmp_path / '2.png')
    assert '2.png has 50 x 30 pixels, and' in refusal(stored)


# Classes and their folders


@pytest.fixture
def folders(tmp_path):
    """Makes class folders of train and val, with other names than train's if `val` is given."""
    def make(train, val=None):
        for split, names in (('train', train), ('val', val or train)):
            for name in names:
                (tmp_path / 'data' / split / name).mkdir(parents=True)
                Image.new('RGB', (4, 4)).save(tmp_path / 'data' / split / name / '0.png')
    return make


def classifier(classes=None, kind='CustomDataset', head=None, **dataset):
    """A classifier's config of data/train and data/val."""
    if classes is not None:
        dataset['metainfo'] = dict(classes=classes)
    return Config({'model': dict(head=dict(num_classes=head)), **{f'{split}_dataloader': dict(dataset=dict(
        dict(type=kind, data_root='data', data_prefix=split), **dataset)) for split in ('train', 'val')}})


def error(cfg, *splits):
    with pytest.raises(PreflightError) as caught:
        check_classes(cfg, splits or ['train', 'val'])
    message = str(caught.value)
    assert '\n' not in message and len(message) < 400
    return message


@pytest.mark.parametrize('train, val, classes, expected', [
    (('bolt', 'nut'), ('bolt', ), None,
     "the folders of data/val are no more from label 1 on, and the folders of data/train 'nut'; labels are"),
    (('bolt', ), ('bolt', 'nut'), None,
     "the folders of data/val are 'nut' from label 1 on, and the folders of data/train no more"),
    (('bolt', 'nut'), None, ('nut', 'bolt'),
     "data/train are 'bolt', 'nut' from label 0 on, and the classes of train_dataloader 'nut', 'bolt'; labels are"),
    (('Mutter', 'bolt'), None, ('bolt', 'Mutter'), "are 'Mutter', 'bolt' from label 0 on"),
    (('Mutter', 'bolt'), None, ('cat', 'dog'),
     "are 'Mutter', 'bolt' from label 0 on, and the classes of train_dataloader 'cat', 'dog'"),
    (('bolt', 'nut'), None, ('bolt', 'nut', 'cow'),
     "are no more from label 2 on, and the classes of train_dataloader 'cow'"),
    (('bolt', 'nut'), None, ('bolt', ), "are 'nut' from label 1 on, and the classes of train_dataloader no more"),
    ((*map(str, range(11)), ), None, (*map(str, range(11)), ), "are '10', '2', '3', '4', '5', ... from label 2 on"),
    ((*map(str, range(11)), ), None, (*'abcdefghijk', ),
     "data/train: folders are sorted as text, '0', '1', '10', '2', '3', ...: write the numbers with as many digits"),
    (('bolt', '.ipynb_checkpoints'), None, None, 'data/train has the folder .ipynb_checkpoints, which counts as a'),
    (('__MACOSX', 'bolt'), None, ('bolt', 'nut'), 'data/train has the folder __MACOSX, which counts as a class'),
    (('car', ), None, 'car', "classes='car' is neither a list of names nor a file of them; a single class is written "
                             "('car', ), with a comma")])
def test_class_folders_of_other_names(train, val, classes, expected, folders):
    folders(train, val)
    assert expected in error(classifier(classes))


@pytest.mark.parametrize('names, settings', [
    (('bolt', 'nut'), {}), (('bolt', 'nut'), dict(classes=('bolt', 'nut'))),
    (('Mutter', 'bolt'), dict(classes=['Mutter', 'bolt'])), ((*map(str, range(10)), ), dict(classes='names.txt')),
    (('n01', 'n02'), dict(classes=('tench', 'goldfish'))), (('0', '1'), dict(classes=('shirt', 'trousers'))),
    ((*map(str, range(11)), ), dict(classes=tuple(sorted(map(str, range(11)))))),
    (('images', '.hidden'), dict(classes=('cat', 'dog'), ann_file='list.txt')),
    (('images', '.hidden'), dict(with_label=False))])
def test_class_folders_that_fit(names, settings, folders, tmp_path, capsys):
    folders(names)
    (tmp_path / 'names.txt').write_text('\n'.join('0123456789'))
    (tmp_path / 'data/list.txt').write_text('images/a b.png 0\nimages/c.png 1\n')
    check_classes(classifier(**settings), ['train', 'val'])
    classes = settings.pop('classes', None)
    if not isinstance(classes, str):
        more = dict(kind='ImageNet', metainfo=dict(classes=classes)) if classes else {}
        check_classes(classifier(**settings, **more), ['train', 'val'])
    assert capsys.readouterr().err == ''


def test_folders_whose_numbers_are_sorted_as_text_are_warned_of(folders, capsys):
    folders(map(str, range(11)))
    check_classes(classifier(), ['train'])
    assert "warning: data/train: folders are sorted as text, '0', '1', '10'" in capsys.readouterr().err


def test_a_data_set_whose_type_has_classes(folders, tmp_path):
    folders(('bolt', 'nut'))
    (tmp_path / 'data/meta').mkdir()
    (tmp_path / 'data/meta/train.txt').write_text('')  # then that is read
    check_classes(classifier(kind='ImageNet', split='train', data_prefix=''), ['train'])
    check_classes(classifier(kind='ImageNet', split='test'), ['val'])
    mixed = classifier(('bolt', 'nut'))
    mixed.val_dataloader.dataset = dict(type='CIFAR10')
    assert "the classes of val_dataloader are 'airplane', " in error(mixed)


def test_a_classifier_has_the_classes_of_its_data(folders, tmp_path):
    folders(('bolt', 'nut'))
    for classes in (None, ('bolt', 'nut')):
        check_classes(classifier(classes, head=2), ['train', 'val'])
        assert "model.head.num_classes is 1000, and the " in (expected := error(classifier(classes, head=1000)))
        assert expected.endswith("are 2: 'bolt', 'nut'; set model.head.num_classes=2.")
    timm = classifier()
    timm.model = dict(type='TimmClassifier', model_name='vit', num_classes=1000)
    assert error(timm).startswith('model.num_classes is 1000')


def detector(heads, wrap=lambda dataset: dataset, classes=('cat', 'dog'), val=None, **model):
    dataset = dict(type='CocoDataset', metainfo=dict(classes=classes))
    return Config(dict(
        default_scope='mmdet', model=dict(type='MaskRCNN', **{'roi_head': heads, **model}),
        train_dataloader=dict(dataset=wrap(dataset)),
        val_dataloader=dict(dataset=dict(dataset, metainfo=dict(classes=val or classes)))))


WRAPPERS = [
    lambda dataset: dataset, lambda dataset: dict(type='RepeatDataset', times=2, dataset=dataset),
    lambda dataset: dict(type='ConcatDataset', datasets=[dataset, dict(type='ClassBalancedDataset', dataset=dataset)]),
    lambda dataset: dict(type='MultiImageMixDataset', dataset=dict(type='RepeatDataset', dataset=dataset))]


@pytest.mark.parametrize('wrap', WRAPPERS)
def test_a_detectors_heads_have_the_classes_of_its_data(wrap):
    right = dict(num_classes=2)
    for heads in (dict(bbox_head=right, mask_head=right), dict(bbox_head=[right] * 3, mask_head=None),
                  dict(bbox_head=right, mask_head=dict(num_classes=80, class_agnostic=True)),
                  dict(bbox_head=right, semantic_head=dict(num_classes=183))):
        check_classes(detector(heads, wrap, rpn_head=dict(num_classes=1)), ['train', 'val'])
    for key, heads in (('roi_head.bbox_head', dict(bbox_head=dict(num_classes=80), mask_head=right)),
                       ('roi_head.mask_head', dict(bbox_head=right, mask_head=dict(num_classes=80))),
                       ('roi_head.bbox_head.1', dict(bbox_head=[right, dict(num_classes=80)]))):
        assert error(detector(heads, wrap)) == (
            f"model.{key}.num_classes is 80, and the classes of train_dataloader are 2: 'cat', 'dog'; "
            f'set model.{key}.num_classes=2.')
    assert error(detector(None, wrap, bbox_head=dict(num_classes=80))).startswith('model.bbox_head.num_classes is 80')
    assert 'num_things_classes is 80' in error(detector(None, wrap, panoptic_head=dict(num_things_classes=80)))
    for part in ('language_model', 'tracker'):
        check_classes(detector(None, wrap, bbox_head=dict(num_classes=256), val=('ant', ), **{part: {}}), ['val'])


def test_the_names_of_classes(tmp_path):
    (tmp_path / 'names.txt').write_text('cat\ndog')
    assert classes_of(dict(type='CocoDataset', metainfo=dict(classes='names.txt'))) == ('cat', 'dog')
    assert classes_of(dict(type='CustomDataset', classes=['cat'])) == ('cat', )
    assert len(classes_of(dict(type='mmdet.CocoDataset'))) == len(classes_of(dict(type='CocoPanopticDataset'))) == 80
    assert classes_of(dict(type='VOCDataset'))[0] == 'aeroplane'
    assert classes_of(dict(type='CustomDataset')) == classes_of(dict(type='NowhereRegistered')) == ()


def test_files_that_are_passed_over_are_counted(folders, capsys):
    folders(('bolt', 'nut'))
    for name in ('1.webp', '2.webp', '3.jfif'):
        Path('data/train/nut', name).touch()
    check_classes(classifier(), ['train', 'val'])
    assert ('warning: data/train: 3 of 5 files are passed over, such as data/train/nut/1.webp; mmpretrain reads .jpg '
            in capsys.readouterr().err)
    check_classes(classifier(extensions=('.png', )), ['val'])
    assert capsys.readouterr().err == ''
    os.rename('data/train/nut/0.png', 'data/train/nut/0.gif')
    assert error(classifier()).startswith('the class folder data/train/nut has no image that mmpretrain reads: 4 files')


def test_a_class_without_images_is_one_of_validation_alone(folders):
    folders(('bolt', 'nut'))
    Path('data/val/nut/0.png').unlink()
    check_classes(classifier(), ['train', 'val'])
    Path('data/train/nut/0.png').unlink()
    assert error(classifier()).startswith('the class folder data/train/nut has no image that mmpretrain reads: 0 files')


def cut(path, suffix):
    """A whole image and its first half."""
    Image.effect_noise((64, 64), 50).save(path.with_suffix(suffix))
    whole = path.with_suffix(suffix).read_bytes()
    path.with_suffix(suffix).write_bytes(whole + b'0' * 999)  # as some phones do
    return whole[:len(whole) // 2]


@pytest.mark.parametrize('damage', [lambda path: b'', lambda path: b'<html>', lambda path: cut(path, '.png'),
                                    lambda path: cut(path, '.jpg')])
def test_damaged_images_are_found_before_a_run(damage, folders, tmp_path):
    folders(('bolt', 'nut'))
    content = damage(tmp_path / 'data/val/nut/whole')
    check_classes(classifier(), ['train', 'val'])
    (tmp_path / 'data/val/nut/1.png').write_bytes(content)
    assert error(classifier()).startswith('data/val: 1 of ') and error(classifier()).endswith(
        'such as data/val/nut/1.png: it is empty, truncated, or not an image.')


def test_images_are_opened_by_the_first_process_and_only_so_many(folders, monkeypatch):
    folders([*'abcdefgh'])
    opened, open_image = [], Image.open
    monkeypatch.setattr(Image, 'open', lambda path: opened.append(path) or open_image(path))
    monkeypatch.setattr(calibration, '_OPENED', 3)
    check_classes(classifier(), ['train'])
    assert sorted(opened) == [f'data/train/{name}/0.png' for name in 'adg']
    monkeypatch.setenv('RANK', '1')
    check_classes(classifier(), ['train'])
    assert len(opened) == 3


# The data sets and evaluators of a config


def coco(root='coco', split='train', **more):
    return dict(type='CocoDataset', data_root=root, ann_file=f'annotations/instances_{split}2017.json',
                data_prefix=dict(img=f'{split}2017/'), **more)


def config(train=None, val=None, **others):
    loaders = {f'{split}_dataloader': dict(dataset=dataset) for split, dataset in (('train', train), ('val', val))
               if dataset}
    return Config({**loaders, **others})


def evaluated(**metric):
    """A config whose validation reads no data set but an evaluator's file."""
    return config(val_evaluator=dict(type='CocoMetric', **metric))


def check(cfg, expected=''):
    """Checks train and val; `expected` is a part of the error, '' for none."""
    if not expected:
        check_data(cfg, ['train', 'val'])
        return ''
    with pytest.raises(PreflightError) as caught:
        check_data(cfg, ['train', 'val'])
    message = str(caught.value)
    assert expected in message and '\n' not in message
    return message


def change(split, edit):
    path = Path(f'coco/annotations/instances_{split}2017.json')
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


@pytest.fixture
def _coco(tmp_path):
    """COCO in the folder `coco`."""
    data_makers.make_coco(tmp_path / 'coco')


def wrapped(dataset):
    return dict(type='ConcatDataset', datasets=[dict(type='RepeatDataset', times=2, dataset=dataset)])


@pytest.mark.parametrize(('cfg', 'expected'), [
    (config(coco()), ''), (config(wrapped(coco())), ''),
    (config(wrapped(coco('mine'))),
     'the data set is not there: mine/annotations/instances_train2017.json: No such file or directory (working dir'),
    (config(dict(type='CustomDataset', data_root='mine')), 'the data set is not there: mine: No such file'),
    (config(coco('s3://bucket/coco/')), ''), (config(coco('/nowhere', backend_args=dict(backend='petrel'))), ''),
    (config(test_dataloader=dict(dataset=coco('nowhere')), test_evaluator=dict(type='CocoMetric', ann_file='no.json')),
     ''),  # test is not asked for
    (evaluated(ann_file='no.json'), 'no.json: No such file'), (evaluated(ann_file=VAL, metric=['bbox', 'segm']), ''),
    (config(val_evaluator=[dict(type='Accuracy'), dict(type='CocoMetric', ann_file='no.json')]), 'no.json: No such'),
    (config(val_evaluator=dict(metrics=[dict(type='Accuracy')])), ''),  # mmengine's Evaluator
    (config(coco(metainfo=dict(classes=['person', 'dog']))), ''),
    (config(coco(metainfo=dict(classes=['dog', 'person']))),
     "are 'person', 'dog' from label 0 on, and metainfo.classes"),
])
@pytest.mark.usefixtures('_coco')
def test_files_of_a_config(cfg, expected):
    check(cfg, expected)


@pytest.mark.usefixtures('_coco')
def test_an_annotation_file_without_objects():
    change('val', lambda content: content['annotations'].clear())
    cfg = config(val=coco(split='val'))
    check(cfg)
    for metric in (dict(type='CocoMetric'), dict(type='CocoMetric', ann_file=VAL)):
        check(config(val=coco(split='val'), val_evaluator=metric), 'has no objects')
    check(evaluated(ann_file=VAL, format_only=True))


@pytest.mark.parametrize('pipeline', [
    [dict(type='LoadAnnotations', with_bbox=True, with_mask=True)],
    [dict(type='RandomChoice', transforms=[[dict(type='LoadAnnotations', with_mask=True)]])]])
@pytest.mark.usefixtures('_coco')
def test_masks_are_required_where_they_are_loaded_or_evaluated(pipeline):
    for split in ('train', 'val'):
        change(split, lambda content: content['annotations'][0].pop('segmentation'))
    check(config(coco(), val_evaluator=dict(type='CocoMetric', metric='bbox', ann_file=VAL)))
    check(config(coco(pipeline=pipeline)), 'annotation 1 has no segmentation')
    check(evaluated(metric=['bbox', 'segm'], ann_file=VAL), 'annotation 1 has no segmentation')


@pytest.mark.usefixtures('_coco')
def test_an_evaluator_has_the_file_of_its_data_set():
    train = 'coco/annotations/instances_train2017.json'
    cfg = config(val=coco(split='val'), val_evaluator=dict(type='CocoMetric', ann_file=train))
    check(cfg)  # the same images
    change('train', lambda content: content['images'][1].update(file_name='7.jpg'))
    problem = f'the evaluator reads {train}, and the data set {VAL}, which has other images: set the evaluator'
    check(cfg, problem)
    change('train', lambda content: content['images'][1].update(id=7, file_name='000000000002.jpg'))
    check(cfg, problem)
    cfg.val_dataloader.dataset.indices = 1
    check(cfg)
    cfg.val_dataloader.dataset = dict(type='ConcatDataset', datasets=[
        coco(split='val'), dict(coco(), data_prefix=dict(img='val2017'), pipeline=[dict(type='LoadFromArchive')])])
    cfg.val_evaluator.ann_file = 'other.json'
    Path('other.json').write_text(Path(VAL).read_text())
    check(cfg, f'the evaluator reads other.json, and the data set {VAL}, {train}, which has other images')
    cfg.val_evaluator.format_only = True
    check(cfg)


@pytest.mark.usefixtures('_coco')
def test_only_images_that_are_loaded_must_exist():
    Path('coco/train2017/000000000002.jpg').unlink()
    filtered = dict(filter_cfg=dict(filter_empty_gt=True))
    for pipeline in ([], [dict(type='LoadImageFromFile')]):
        check(config(coco(**filtered, pipeline=pipeline)), '1 of 2 images cannot be used, such as')
    for elsewhere in (dict(pipeline=[dict(type='LoadImageFromFile', backend_args=dict(backend='petrel'))]),
                      dict(pipeline=[dict(type='LoadFromArchive')]), dict(indices=1)):
        check(config(coco(**filtered, **elsewhere)))
    change('train', lambda content: [annotation.update(image_id=1) for annotation in content['annotations']])
    check(config(coco(**filtered)))
    check(config(coco(**filtered, test_mode=True)), '1 of 2 images cannot be used')


@pytest.mark.usefixtures('_coco')
def test_both_files_of_a_run_are_read_once(monkeypatch, capsys):
    change('val', lambda content: content['annotations'][0].update(bbox=[500, 0, 9, 9]))
    read, read_text = [], Path.read_text
    monkeypatch.setattr(Path, 'read_text', lambda path: read.append(path.name) or read_text(path))
    cfg = config(coco(), coco(split='val'), val_evaluator=dict(type='CocoMetric', ann_file=VAL))
    check(cfg)
    assert read == ['instances_train2017.json', 'instances_val2017.json']
    assert '1 of 6 objects are left out' in capsys.readouterr().err
    # A metric's labels are those of its split's data set.
    change('val', lambda content: content['categories'].reverse())
    cfg.val_dataloader = dict(dataset=coco())
    check(cfg, "instances_val2017.json ('toothbrush', ")
