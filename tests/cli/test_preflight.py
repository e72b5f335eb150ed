import json
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmpretrain.datasets import CIFAR10, CIFAR100

from mmunorm.cli.preflight import check_data, check_pretrained
from mmunorm.utils import PreflightError

from .. import data_makers


def coco_dataset(root, split='train'):
    return dict(type='CocoDataset', data_root=str(root), ann_file=f'annotations/instances_{split}2017.json',
                data_prefix=dict(img=f'{split}2017/'))


def config(dataset, split='train'):
    return Config({f'{split}_dataloader': dict(dataset=dataset)})


def error(cfg, *splits):
    with pytest.raises(PreflightError) as caught:
        check_data(cfg, splits or ['train'])
    message = str(caught.value)
    assert '\n' not in message
    return message


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_coco(tmp_path):
    cfg = config(coco_dataset('data/coco/'))
    message = error(cfg)
    assert 'data/coco/annotations/instances_train2017.json' in message
    assert 'data/coco/train2017' in message
    assert 'https://cocodataset.org' in message and f'working directory {tmp_path}' in message

    data_makers.make_coco(tmp_path / 'data/coco')
    check_data(cfg, ['train'])
    for image in (tmp_path / 'data/coco/train2017').iterdir():
        image.unlink()
    assert 'no folder data/coco/train2017, or it is empty' in error(cfg)


def test_only_the_asked_splits_and_evaluators_are_looked_at(tmp_path):
    data_makers.make_coco(tmp_path, splits=['train2017'])
    metric = dict(type='CocoMetric', ann_file=str(tmp_path / 'val.json'))
    cfg = Config(dict(train_dataloader=dict(dataset=coco_dataset(tmp_path)), test_dataloader=None,
                      val_dataloader=dict(dataset=coco_dataset(tmp_path, 'val')), test_evaluator=metric))
    check_data(cfg, ['train'])
    assert 'instances_val2017.json' in error(cfg, 'train', 'val')
    assert 'val.json' in error(cfg, 'test')
    cfg.test_evaluator = [dict(type='Accuracy'), metric]
    assert 'val.json' in error(cfg, 'test')
    (tmp_path / 'val.json').write_text('{"images": [], "annotations": [], "categories": []}')
    assert 'it has no objects' in error(cfg, 'test')
    metric['format_only'] = True
    cfg.test_evaluator = metric
    check_data(cfg, ['test'])
    (tmp_path / 'val.json').write_text('{"images": [], "annotations": [3], "categories": []}')
    assert 'annotations and categories must be objects' in error(cfg, 'test')


def test_validation_without_objects_is_refused(tmp_path):
    data_makers.make_coco(tmp_path)
    change_annotations(tmp_path / 'annotations/instances_val2017.json', lambda content: content['annotations'].clear())
    cfg = config(coco_dataset(tmp_path, 'val'), 'val')
    check_data(cfg, ['val'])
    cfg.val_evaluator = dict(type='CocoMetric')  # which takes the file of the data set
    assert 'it has no objects' in error(cfg, 'val')


@pytest.mark.parametrize('topk', [5, (1, 5)])
def test_topk_of_fewer_classes(topk):
    cfg = Config(dict(model=dict(head=dict(num_classes=2)), val_evaluator=[dict(type='Accuracy', topk=topk)]))
    assert 'and the model has 2 classes: set val_evaluator.topk' in error(cfg, 'val')
    cfg.model.head.num_classes = 5
    check_data(cfg, ['val'])


def test_misspelt_arguments_of_metrics():
    cfg = Config(dict(default_scope='mmdet', val_evaluator=[dict(type='CocoMetric', metrics='bbox')]))
    assert error(cfg, 'val').startswith(
        'val_evaluator.0.metrics: CocoMetric has no such argument; did you mean val_evaluator.0.metric?')
    cfg.val_evaluator = dict(metrics=[dict(type='Accuracy')])  # mmengine's Evaluator
    check_data(cfg, ['val'])


def test_categories_of_other_names(tmp_path):
    data_makers.make_coco(tmp_path, splits=['train2017'])
    dataset = coco_dataset(tmp_path)
    check_data(config(dict(dataset, metainfo=dict(classes=['person', 'dog']))), ['train'])
    message = error(config(dict(dataset, metainfo=dict(classes=['dog', 'person']))))
    assert "in the order 'person', 'dog', and metainfo.classes of the config in the order 'dog', 'person'" in message
    message = error(config(dict(dataset, metainfo=dict(classes=['kitten']))))
    assert "metainfo.classes of the config has none of them: 'kitten'" in message
    (tmp_path / 'names.txt').write_text('dog')
    check_data(config(dict(dataset, metainfo=dict(classes='names.txt'))), ['train'])


def change_annotations(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize('masks', [
    dict(pipeline=[dict(type='LoadAnnotations', with_bbox=True, with_mask=True)]),
    dict(pipeline=[dict(type='RandomChoice', transforms=[[dict(type='LoadAnnotations', with_mask=True)]])])])
def test_masks_are_asked_for_where_they_are_loaded_or_evaluated(masks, tmp_path):
    data_makers.make_coco(tmp_path)
    for split in ('train', 'val'):
        change_annotations(tmp_path / f'annotations/instances_{split}2017.json',
                           lambda content: content['annotations'][0].pop('segmentation'))
    dataset, metric = coco_dataset(tmp_path), dict(type='CocoMetric', metric='bbox', ann_file=str(
        tmp_path / 'annotations/instances_val2017.json'))
    check_data(Config(dict(train_dataloader=dict(dataset=dataset), val_evaluator=metric)), ['train', 'val'])
    assert 'annotation 1 has no segmentation' in error(config(dict(dataset, **masks)))
    metric['metric'] = ['bbox', 'segm']
    assert 'annotation 1 has no segmentation' in error(Config(dict(val_evaluator=metric)), 'val')


def test_an_evaluator_has_the_file_of_its_data_set(tmp_path):
    data_makers.make_coco(tmp_path)
    train, val = (tmp_path / f'annotations/instances_{split}2017.json' for split in ('train', 'val'))
    cfg = Config(dict(val_dataloader=dict(dataset=coco_dataset(tmp_path, 'val')),
                      val_evaluator=dict(type='CocoMetric', ann_file=str(train))))
    check_data(cfg, ['val'])  # the same images
    change_annotations(train, lambda content: content['images'][1].update(file_name='7.jpg'))
    assert (f'the evaluator reads {train}, and the data set {val}: 1 of 2 images differ, such as id 2, which is 7.jpg '
            "and 000000000002.jpg; set the evaluator's ann_file") in error(cfg, 'val')
    change_annotations(train, lambda content: content['images'][1].update(id=7, file_name='000000000002.jpg'))
    assert '2 of 3 images differ, such as id 7, which is 000000000002.jpg and None' in error(cfg, 'val')
    cfg.val_evaluator.format_only = True
    check_data(cfg, ['val'])
    cfg.val_evaluator = dict(type='CocoMetric', ann_file=str(train))
    cfg.val_dataloader.dataset.indices = 1
    check_data(cfg, ['val'])
    cfg.val_dataloader.dataset = dict(type='ConcatDataset', datasets=[
        coco_dataset(tmp_path, 'val'), dict(coco_dataset(tmp_path, 'train'), data_prefix=dict(img='val2017'))])
    assert '1 of 3 images differ' in error(cfg, 'val')


def test_only_images_that_are_loaded_must_be_there(tmp_path):
    data_makers.make_coco(tmp_path)
    (tmp_path / 'train2017/000000000002.jpg').unlink()
    dataset = dict(coco_dataset(tmp_path), filter_cfg=dict(filter_empty_gt=True))
    for pipeline in ([], [dict(type='LoadImageFromFile')]):
        assert '1 of 2 images are missing, such as' in error(config(dict(dataset, pipeline=pipeline)))
    for elsewhere in (dict(pipeline=[dict(type='LoadImageFromFile', backend_args=dict(backend='petrel'))]),
                      dict(pipeline=[dict(type='LoadFromArchive')]), dict(indices=1)):
        check_data(config(dict(dataset, **elsewhere)), ['train'])
    path = tmp_path / 'annotations/instances_train2017.json'
    change_annotations(path, lambda content: [one.update(image_id=1) for one in content['annotations']])
    check_data(config(dataset), ['train'])
    assert '1 of 2 images are missing' in error(config(dict(dataset, test_mode=True)))


def test_both_files_of_a_run_are_read_once(tmp_path, monkeypatch, capsys):
    data_makers.make_coco(tmp_path)
    change_annotations(tmp_path / 'annotations/instances_val2017.json',
                       lambda content: content['annotations'][0].update(bbox=[500, 0, 9, 9]))
    read, load = [], json.load
    monkeypatch.setattr('json.load', lambda file: read.append(Path(file.name).name) or load(file))
    cfg = config(coco_dataset(tmp_path))
    cfg.val_dataloader = dict(dataset=coco_dataset(tmp_path, 'val'))
    cfg.val_evaluator = dict(type='CocoMetric', ann_file=str(tmp_path / 'annotations/instances_val2017.json'))
    check_data(cfg, ['train', 'val'])
    assert read == ['instances_train2017.json', 'instances_val2017.json']
    assert 'warning: ' in (said := capsys.readouterr().err) and '1 of 6 objects are left out' in said
    # A metric's labels are those of its split's data set.
    change_annotations(tmp_path / 'annotations/instances_val2017.json',
                       lambda content: content['categories'].reverse())
    cfg.val_dataloader = dict(dataset=dict(type='CustomDataset', data_prefix='train2017'))
    check_data(cfg, ['val'])
    cfg.val_dataloader = dict(dataset=coco_dataset(tmp_path))
    assert "instances_val2017.json cannot be used: its categories are in the order 'toothbrush'" in error(cfg, 'val')


@pytest.mark.parametrize('wrap', [
    lambda dataset: dict(type='RepeatDataset', times=2, dataset=dataset),
    lambda dataset: dict(type='ConcatDataset', datasets=[dict(type='RepeatDataset', dataset=dataset)]),
])
def test_wrapped_data_sets_are_found(wrap, tmp_path):
    cfg = config(wrap(coco_dataset(tmp_path / 'mine')))
    message = error(cfg)
    assert f'{tmp_path}/mine/train2017' in message
    # It is not COCO itself, so its source is not known.
    assert 'cocodataset' not in message and 'data_root' in message
    data_makers.make_coco(tmp_path / 'mine')
    check_data(cfg, ['train'])


def test_imagenet(tmp_path):
    dataset = dict(type='ImageNet', data_root=str(tmp_path / 'imagenet'), split='train')
    message = error(config(dataset))
    assert f'{tmp_path}/imagenet/train' in message and 'https://image-net.org' in message
    (tmp_path / 'imagenet/train/n00000000').mkdir(parents=True)
    assert 'train has 1 class folders, and the classes of train_dataloader' in error(config(dataset))
    for number in range(1, 1000):
        (tmp_path / f'imagenet/train/n{number:08d}').mkdir()
    check_data(config(dataset), ['train'])


@pytest.mark.parametrize('cls', [CIFAR10, CIFAR100])
def test_cifar(cls, tmp_path, monkeypatch):
    root = tmp_path / cls.__name__.lower()
    dataset = dict(type=cls.__name__, data_root=str(root), split='train', download=False)
    message = error(config(dataset))
    # The class reads both splits' files, whichever it is for.
    count = len(cls.train_list) + len(cls.test_list)
    assert f'{root}/{cls.base_folder}' in message and cls.url in message
    assert (f'and {count - 3} more' in message) == (count > 3)
    check_data(config({**dataset, 'download': True}), ['train'])

    tables = data_makers.make_cifar(root, cls)
    assert 'damaged' in error(config(dataset))
    for table, entries in tables.items():
        monkeypatch.setattr(cls, table, entries)
    check_data(config(dataset), ['train'])
    # The class agrees.
    dataset.pop('type')
    assert len(cls(**dataset)) == 2 * len(cls.train_list)


@pytest.mark.parametrize('dataset', [
    dict(type='CUB', data_root='.', split='train'),  # a split is a folder for ImageNet only
    coco_dataset('s3://bucket/coco/'), dict(coco_dataset('/nowhere'), backend_args=dict(backend='petrel'))])
def test_what_is_left_to_the_class(dataset):
    check_data(config(dataset), ['train'])


@pytest.mark.parametrize('root, img, said', [
    ('data/digits/imagenet', 'train', '`python tools/dataset/make_digits.py`'),
    ('data/photographs/imagenet', 'train', '`python projects/photographs/tools/make_photographs.py`')])
def test_where_data_come_from(root, img, said, tmp_path):
    (tmp_path / root / 'target').mkdir(parents=True)
    (tmp_path / root / 'target/1.png').write_text('')
    dataset = dict(type='AnyDataset', data_root=root, data_prefix=dict(img=img, target='target'))
    message = error(config(dataset))
    assert f'no folder {root}/{img}, or it is empty' in message and said in message


@pytest.mark.parametrize('part, more', [
    ('backbone', 'pretrained=PATH.*pretrained=None'),
    ('enhancer', 'model.enhancer.init_cfg.checkpoint=PATH.*model.enhancer.init_cfg=None')])
def test_pretrained(part, more, tmp_path):
    init_cfg = dict(type='Pretrained', checkpoint='work_dirs/swin_un/epoch_3.pth')
    cfg = Config(dict(model={part: dict(init_cfg=init_cfg)}))
    with pytest.raises(PreflightError, match=f'the {part} weights.*no file work_dirs/swin_un/epoch_3.pth.*{more}') as e:
        check_pretrained(cfg, 'configs/detector.py')
    assert 'train.py' not in str(e.value)  # nobody knows which config makes it
    for folder in ('configs/other', 'configs'):
        maker = tmp_path / folder / 'swin_un.py'
        maker.parent.mkdir(parents=True, exist_ok=True)
        maker.write_text('')
        with pytest.raises(PreflightError, match=f'`python tools/train.py {folder}/swin_un.py`'):
            check_pretrained(cfg, 'configs/mine/detector.py' if 'other' in folder else 'configs/detector.py')

    (tmp_path / 'work_dirs/swin_un').mkdir(parents=True)
    (tmp_path / 'work_dirs/swin_un/epoch_3.pth').write_text('hello')
    with pytest.raises(PreflightError, match='cannot read the checkpoint work_dirs/swin_un/epoch_3.pth'):
        check_pretrained(cfg, 'configs/detector.py')
    torch.save({}, tmp_path / 'work_dirs/swin_un/epoch_3.pth')
    check_pretrained(cfg, 'configs/detector.py')
    cfg.model[part].init_cfg.checkpoint = 'work_dirs'
    with pytest.raises(PreflightError, match='work_dirs is a folder: a checkpoint is a file'):
        check_pretrained(cfg, 'configs/detector.py')


@pytest.mark.parametrize('init_cfg', [
    None, [dict(type='TruncNormal', layer='Linear')],
    dict(type='Pretrained', checkpoint='https://example.org/a.pth'),
    dict(type='Pretrained', checkpoint='torchvision://resnet50')])
def test_pretrained_elsewhere_or_not_at_all(init_cfg):
    check_pretrained(Config(dict(model=dict(backbone=dict(init_cfg=init_cfg)))), 'a.py')
    check_pretrained(Config(dict(model=dict(type='DETR'))), 'a.py')
