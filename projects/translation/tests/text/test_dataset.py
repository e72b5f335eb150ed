import shutil

import numpy as np
import pytest
import torch
from mmengine.registry import DATASETS, FUNCTIONS

from mmunorm.utils import PreflightError
from projects.translation.translation.text import EOS, PAD, TranslationDataset, dataset, pad_translations

from .makers import sentence_pairs, write_pairs


@pytest.fixture
def settings(text, tmp_path):
    for name in ('train.src', 'train.tgt'):
        shutil.copy(text / name, tmp_path)
    return dict(source=tmp_path / 'train.src', target=tmp_path / 'train.tgt', subwords=text / 'subwords.model')


def check_items(data, pairs):
    assert len(data) == len(pairs)
    encode = data.subwords.encode
    for i, (source, target) in enumerate(pairs):
        item = data[i]
        assert item['source'].dtype == item['target'].dtype == np.int64
        assert item['source'].tolist() == [*encode(source), EOS] and item['target'].tolist() == [*encode(target), EOS]
        assert data.lengths[i].tolist() == [len(item['source']), len(item['target'])] and item['index'] == i


def test_items_are_lines_with_their_ends(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, 'LINES', 64)  # lines are encoded in parts
    settings.update(source='train.src', target='train.tgt', data_root=tmp_path)
    check_items(DATASETS.build(dict(type='TranslationDataset', **settings)), sentence_pairs(200))


def test_a_text_is_encoded_once_and_again_when_it_changes(settings, tmp_path):
    """The ids of train.src.tok are none of train.src."""
    longer = [tmp_path / f'{name}.tok' for name in ('train.src', 'train.tgt')]
    for path in longer:
        shutil.copy(path.with_suffix(''), path)
    TranslationDataset(*longer, settings['subwords'])
    TranslationDataset(**settings)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob('*.ids')}
    check_items(TranslationDataset(**settings), sentence_pairs(200))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob('*.ids')} == before and len(before) == 4
    pairs = sentence_pairs(150, seed=2)
    write_pairs(tmp_path, 'train', pairs)
    check_items(TranslationDataset(**settings), pairs)
    after = set(tmp_path.glob('*.ids'))
    assert len(after) == 4 and after & before.keys() == set(tmp_path.glob('*.tok.*.ids'))


def test_long_pairs_are_left_out_and_keep_their_line_numbers(settings):
    everything = TranslationDataset(**settings)
    short = everything.lengths.max(1) <= 8
    data = TranslationDataset(**settings, max_length=8)
    assert 0 < len(data) < 200 and [item['index'] for item in data] == np.flatnonzero(short).tolist()
    np.testing.assert_array_equal(data.lengths, everything.lengths[short])
    with pytest.raises(PreflightError, match='each pair .* more than max_length=2 subwords'):
        TranslationDataset(**settings, max_length=2)


def test_texts_that_do_not_fit_are_refused(settings, tmp_path):
    lines = settings['target'].read_text().splitlines(keepends=True)
    settings['target'].write_text(''.join(lines[:-1]))
    with pytest.raises(PreflightError, match='train.src has 200 lines and .*train.tgt has 199 lines'):
        TranslationDataset(**settings)
    lines[9] = '\n'
    settings['target'].write_text(''.join(lines))
    with pytest.raises(PreflightError, match='train.tgt, line 10: an empty line'):
        TranslationDataset(**settings)
    with pytest.raises(PreflightError, match='cannot read the text .*none'):
        TranslationDataset(**dict(settings, source=tmp_path / 'none'))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith('.')]


def test_a_folder_that_cannot_be_written_is_named(settings, monkeypatch):
    def refuse(path, *args):
        raise PermissionError(13, 'Permission denied', str(path))

    monkeypatch.setattr(dataset, 'open', refuse, raising=False)
    with pytest.raises(PreflightError, match=r'cannot write .*train.src.*Permission denied; subword ids are cached'):
        TranslationDataset(**settings)


def test_padding_is_on_the_right(settings):
    data = TranslationDataset(**settings)
    items = [data[i] for i in (5, 0, 7)]
    batch = FUNCTIONS.get('pad_translations')(items)
    assert batch['index'].tolist() == [5, 0, 7]
    for side in ('source', 'target'):
        assert batch[side].dtype == torch.int64 and batch[side].shape == (3, max(len(item[side]) for item in items))
        for row, item in zip(batch[side].tolist(), items, strict=True):
            assert row == [*item[side].tolist(), *[PAD] * (len(row) - len(item[side]))]
    assert pad_translations(items[:1])['source'].shape == (1, len(items[0]['source']))
