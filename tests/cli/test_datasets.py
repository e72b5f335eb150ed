"""Class names and their number: of folders, of data sets, and of the heads of a model."""
import pytest
from mmengine.config import Config

from mmunorm.cli.datasets import check_classes, classes_of
from mmunorm.utils import PreflightError


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folders(tmp_path):
    """Makes class folders of train and val, with other names than train's if `val` is given."""
    def make(train, val=None):
        for split, names in (('train', train), ('val', val or train)):
            for name in names:
                (tmp_path / 'data' / split / name).mkdir(parents=True)
    return make


def config(classes=None, kind='CustomDataset', head=None, **dataset):
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
    (('bolt', 'nut'), ('bolt', ), None, "the folders of data/val lack 'nut' of the folders of data/train"),
    (('bolt', ), ('bolt', 'nut'), None, "the folders of data/val have 'nut', and the folders of data/train have not"),
    (('bolt', 'nut'), None, ('nut', 'bolt'),
     "data/train are 'bolt', 'nut' from label 0 on, and the classes of train_dataloader 'nut', 'bolt'; labels are"),
    (('Mutter', 'bolt'), None, ('bolt', 'Mutter'), "are 'Mutter', 'bolt' from label 0 on"),
    (('Mutter', 'bolt'), None, ('cat', 'dog'), "data/train lack 'cat', 'dog' of the classes of train_dataloader"),
    (('bolt', 'nut'), None, ('bolt', 'nut', 'cow'), "lack 'cow' of the classes"),
    (('bolt', 'nut'), None, ('bolt', ), "have 'nut', and the classes of train_dataloader have not"),
    ((*map(str, range(11)), ), None, (*map(str, range(11)), ), "are '10', '2', '3', '4', '5', ... from label 2 on"),
    ((*map(str, range(11)), ), None, (*'abcdefghijk', ),
     "label 2 is the folder '10' and the class 'c'; write the numbers with as many digits"),
    (('bolt', '.ipynb_checkpoints'), None, None, 'data/train has the hidden folder .ipynb_checkpoints, which counts'),
    (('car', ), None, 'car', "classes='car' is neither a list of names nor a file of them; a single class is written "
                             "('car', ), with a comma")])
def test_class_folders_of_other_names(train, val, classes, expected, folders):
    folders(train, val)
    assert expected in error(config(classes))


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
    check_classes(config(**settings), ['train', 'val'])
    classes = settings.pop('classes', None)
    if not isinstance(classes, str):
        check_classes(config(**settings, **(dict(kind='ImageNet', metainfo=dict(classes=classes)) if classes else {})),
                      ['train', 'val'])
    assert capsys.readouterr().err == ''


def test_folders_whose_numbers_are_sorted_as_text_are_warned_of(folders, capsys):
    folders(map(str, range(11)))
    check_classes(config(), ['train'])
    assert "warning: data/train: folders are sorted as text, so that label 2 is the folder '10'." in (
        capsys.readouterr().err)


def test_a_data_set_whose_type_has_classes(folders, tmp_path):
    folders(('bolt', 'nut'))
    assert 'data/train has 2 class folders, and the classes of train_dataloader, those of its type, are 1000' in error(
        config(kind='ImageNet'))
    (tmp_path / 'data/meta').mkdir()
    (tmp_path / 'data/meta/train.txt').write_text('')  # then that is read
    check_classes(config(kind='ImageNet', split='train', data_prefix=''), ['train'])
    check_classes(config(kind='ImageNet', split='test'), ['val'])
    mixed = config(('bolt', 'nut'))
    mixed.val_dataloader.dataset = dict(type='CIFAR10')
    assert "the classes of val_dataloader lack 'bolt', 'nut' of the classes of train_dataloader" in error(mixed)


def test_a_classifier_has_the_classes_of_its_data(folders, tmp_path):
    folders(('bolt', 'nut'))
    for classes in (None, ('bolt', 'nut')):
        check_classes(config(classes, head=2), ['train', 'val'])
        assert "model.head.num_classes is 1000, and the " in (expected := error(config(classes, head=1000)))
        assert expected.endswith("are 2: 'bolt', 'nut'; set model.head.num_classes=2.")
    mixed = config(head=2)
    mixed.model.train_cfg, mixed.data_preprocessor = dict(augments=dict(type='Mixup')), dict(num_classes=1000)
    assert error(mixed).startswith('data_preprocessor.num_classes is 1000')
    mixed.model.train_cfg = None
    check_classes(mixed, ['train', 'val'])
    timm = config()
    timm.model = dict(type='TimmClassifier', model_name='vit', num_classes=1000)
    assert error(timm).startswith('model.num_classes is 1000')


def test_labels_of_a_list(tmp_path):
    (tmp_path / 'data').mkdir()
    path = tmp_path / 'data/list.txt'
    path.write_text('a.png 0\nb c.png 4 \n')
    check_classes(config(ann_file='list.txt', head=5), ['train'])
    check_classes(config(ann_file='list.txt', head=9), ['train'])  # others may not occur
    assert 'model.head.num_classes is 4, and the labels of ann_file are 5' in error(
        config(ann_file='list.txt', head=4))
    assert error(config((*'abcd', ), ann_file='list.txt')).startswith(
        'list.txt of train_dataloader has the label 4, and the classes of train_dataloader are 4, from label 0 on')
    path.write_text('a.png,0\n')
    assert "data/list.txt: each line must be the path of an image and the number of its class, not 'a.png,0'" in error(
        config(ann_file='list.txt'))


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


def test_data_sets_of_a_detector_have_the_same_classes():
    assert "the classes of val_dataloader are 'dog', 'cat' from label 0 on, and the" in error(
        detector({}, val=('dog', 'cat')))
    assert "classes='car' is neither" in error(detector({}, classes='car'))


def test_the_names_of_classes(tmp_path):
    (tmp_path / 'names.txt').write_text('cat\ndog')
    assert classes_of(dict(type='CocoDataset', metainfo=dict(classes='names.txt'))) == ('cat', 'dog')
    assert classes_of(dict(type='CustomDataset', classes=['cat'])) == ('cat', )
    assert len(classes_of(dict(type='mmdet.CocoDataset'))) == len(classes_of(dict(type='CocoPanopticDataset'))) == 80
    assert classes_of(dict(type='VOCDataset'))[0] == 'aeroplane'
    assert classes_of(dict(type='CustomDataset')) == classes_of(dict(type='NowhereRegistered')) == ()
