"""Checks before a run: files, annotations, evaluators and initial weights."""
import json
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmpretrain.datasets import CIFAR10

from mmunorm.cli.preflight import check_data, check_pretrained
from mmunorm.utils import PreflightError

from .. import data_makers

VAL = 'coco/annotations/instances_val2017.json'


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


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    """A folder with COCO in `coco`."""
    monkeypatch.chdir(tmp_path)
    data_makers.make_coco(tmp_path / 'coco')


def wrapped(dataset):
    return dict(type='ConcatDataset', datasets=[dict(type='RepeatDataset', times=2, dataset=dataset)])


@pytest.mark.parametrize(('cfg', 'expected'), [
    (config(coco()), ''), (config(wrapped(coco())), ''),
    (config(coco('data/coco')), 'https://cocodataset.org'),
    (config(coco('data/coco')), 'no file data/coco/annotations/instances_train2017.json'),
    (config(coco('data/coco')), 'no folder data/coco/train2017, or it is empty'),
    (config(wrapped(coco('mine'))), 'no folder mine/train2017, or it is empty (working directory '),
    (config(wrapped(coco('mine'))), 'check data_root'),  # it is not COCO itself
    (config(coco('s3://bucket/coco/')), ''), (config(coco('/nowhere', backend_args=dict(backend='petrel'))), ''),
    (config(dict(type='CUB', data_root='.', split='train')), ''),  # a split is a folder for ImageNet only
    (config(dict(type='AnyDataset', data_root='data/digits', data_prefix='train')),
     '`python projects/digits/tools/make_digits.py`'),
    (config(dict(type='ImageNet', data_root='data/imagenet', split='train')), 'https://image-net.org'),
    (config(test_dataloader=dict(dataset=coco('nowhere')), test_evaluator=dict(type='CocoMetric', ann_file='no.json')),
     ''),  # test is not asked for
    (evaluated(ann_file='no.json'), 'no file no.json'), (evaluated(ann_file=VAL, metric=['bbox', 'segm']), ''),
    (config(val_evaluator=[dict(type='Accuracy'), dict(type='CocoMetric', ann_file='no.json')]), 'no file no.json'),
    (config(model=dict(head=dict(num_classes=2)), val_evaluator=[dict(type='Accuracy', topk=(1, 5))]),
     'the evaluators have topk=(1, 5), and the model has 2 classes: set val_evaluator.topk'),
    (config(model=dict(head=dict(num_classes=5)), val_evaluator=dict(type='Accuracy', topk=5)), ''),
    (config(val_evaluator=dict(metrics=[dict(type='Accuracy')])), ''),  # mmengine's Evaluator
    (config(coco(metainfo=dict(classes=['person', 'dog']))), ''),
    (config(coco(metainfo=dict(classes=['dog', 'person']))), "in the order 'person', 'dog', and metainfo.classes"),
])
def test_files_and_arguments(cfg, expected):
    check(cfg, expected)


def test_an_annotation_file_without_objects():
    change('val', lambda content: content['annotations'].clear())
    cfg = config(val=coco(split='val'))
    check(cfg)
    for metric in (dict(type='CocoMetric'), dict(type='CocoMetric', ann_file=VAL)):
        check(config(val=coco(split='val'), val_evaluator=metric), 'it has no objects')
    check(evaluated(ann_file=VAL, format_only=True))
    change('val', lambda content: content['annotations'].append(3))
    check(evaluated(ann_file=VAL, format_only=True), 'annotations and categories must be objects')


@pytest.mark.parametrize('pipeline', [
    [dict(type='LoadAnnotations', with_bbox=True, with_mask=True)],
    [dict(type='RandomChoice', transforms=[[dict(type='LoadAnnotations', with_mask=True)]])]])
def test_masks_are_required_where_they_are_loaded_or_evaluated(pipeline):
    for split in ('train', 'val'):
        change(split, lambda content: content['annotations'][0].pop('segmentation'))
    check(config(coco(), val_evaluator=dict(type='CocoMetric', metric='bbox', ann_file=VAL)))
    check(config(coco(pipeline=pipeline)), 'annotation 1 has no segmentation')
    check(evaluated(metric=['bbox', 'segm'], ann_file=VAL), 'annotation 1 has no segmentation')


def test_an_evaluator_has_the_file_of_its_data_set():
    train = 'coco/annotations/instances_train2017.json'
    cfg = config(val=coco(split='val'), val_evaluator=dict(type='CocoMetric', ann_file=train))
    check(cfg)  # the same images
    change('train', lambda content: content['images'][1].update(file_name='7.jpg'))
    check(cfg, f'the evaluator reads {train}, and the data set {VAL}: 1 of 2 images differ, such as id 2, which is '
          "7.jpg and 000000000002.jpg; set the evaluator's ann_file")
    change('train', lambda content: content['images'][1].update(id=7, file_name='000000000002.jpg'))
    check(cfg, '2 of 3 images differ, such as id 7, which is 000000000002.jpg and None')
    cfg.val_dataloader.dataset.indices = 1
    check(cfg)
    cfg.val_dataloader.dataset = dict(type='ConcatDataset', datasets=[
        coco(split='val'), dict(coco(), data_prefix=dict(img='val2017'))])
    check(cfg, '1 of 3 images differ')
    cfg.val_evaluator.format_only = True
    check(cfg)


def test_only_images_that_are_loaded_must_exist():
    Path('coco/train2017/000000000002.jpg').unlink()
    filtered = dict(filter_cfg=dict(filter_empty_gt=True))
    for pipeline in ([], [dict(type='LoadImageFromFile')]):
        check(config(coco(**filtered, pipeline=pipeline)), '1 of 2 images are missing, such as')
    for elsewhere in (dict(pipeline=[dict(type='LoadImageFromFile', backend_args=dict(backend='petrel'))]),
                      dict(pipeline=[dict(type='LoadFromArchive')]), dict(indices=1)):
        check(config(coco(**filtered, **elsewhere)))
    change('train', lambda content: [annotation.update(image_id=1) for annotation in content['annotations']])
    check(config(coco(**filtered)))
    check(config(coco(**filtered, test_mode=True)), '1 of 2 images are missing')


def test_both_files_of_a_run_are_read_once(monkeypatch, capsys):
    change('val', lambda content: content['annotations'][0].update(bbox=[500, 0, 9, 9]))
    read, load = [], json.load
    monkeypatch.setattr('json.load', lambda file: read.append(Path(file.name).name) or load(file))
    cfg = config(coco(), coco(split='val'), val_evaluator=dict(type='CocoMetric', ann_file=VAL))
    check(cfg)
    assert read == ['instances_train2017.json', 'instances_val2017.json']
    assert '1 of 6 objects are left out' in capsys.readouterr().err
    # A metric's labels are those of its split's data set.
    change('val', lambda content: content['categories'].reverse())
    cfg.val_dataloader = dict(dataset=coco())
    check(cfg, "instances_val2017.json cannot be used: its categories are in the order 'toothbrush'")


def test_cifar(tmp_path):
    dataset = dict(type='CIFAR10', data_root=str(tmp_path / 'cifar10'), split='train', download=False)
    message = check(config(dataset), f'{tmp_path}/cifar10/{CIFAR10.base_folder}')
    assert CIFAR10.url in message and 'and 3 more' in message  # the class reads the files of both splits
    check(config({**dataset, 'download': True}))
    data_makers.make_cifar(tmp_path / 'cifar10', CIFAR10)
    check(config(dataset))


@pytest.mark.parametrize('part, more', [
    ('backbone', 'pretrained=PATH.*pretrained=None'),
    ('enhancer', 'model.enhancer.init_cfg.checkpoint=PATH.*model.enhancer.init_cfg=None')])
def test_pretrained(part, more):
    path = Path('work_dirs/swin_un/epoch_3.pth')
    cfg = Config(dict(model={part: dict(init_cfg=dict(type='Pretrained', checkpoint=str(path)))}))

    def refused(expected, config_path='configs/detector.py'):
        with pytest.raises(PreflightError, match=expected) as caught:
            check_pretrained(cfg, config_path)
        return str(caught.value)

    # Without the config that makes it, the message does not name one.
    assert 'train.py' not in refused(f'the {part} weights.*no file {path}.*{more}')
    for folder in ('configs/other', 'configs'):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, 'swin_un.py').touch()
        refused(f'`python tools/train.py {folder}/swin_un.py`',
                'configs/mine/detector.py' if 'other' in folder else 'configs/detector.py')
    path.parent.mkdir(parents=True)
    path.write_text('hello')
    refused(f'cannot read the checkpoint {path}')
    torch.save({}, path)
    check_pretrained(cfg, 'configs/detector.py')
    cfg.model[part].init_cfg.checkpoint = 'work_dirs'
    refused('work_dirs is a folder: a checkpoint is a file')


@pytest.mark.parametrize('init_cfg', [
    None, [dict(type='TruncNormal', layer='Linear')],
    dict(type='Pretrained', checkpoint='https://example.org/a.pth'),
    dict(type='Pretrained', checkpoint='torchvision://resnet50')])
def test_pretrained_elsewhere_or_not_at_all(init_cfg):
    check_pretrained(Config(dict(model=dict(backbone=dict(init_cfg=init_cfg)))), 'a.py')
    check_pretrained(Config(dict(model=dict(type='DETR'))), 'a.py')
