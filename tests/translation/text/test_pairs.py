import zlib

import pytest

from mmunorm.translation.text import pairs

from .makers import sentence_pairs


def test_sentences_are_paired_where_they_are_equally_many():
    assert pairs.sentence_pairs('One  v1.2\nof e.g. this. Two! 3 is "it"? (Yes.) no', 'Uno. Due! Tre? (Sì.) no') == [
        ('One v1.2 of e.g. this.', 'Uno.'), ('Two!', 'Due!'), ('3 is "it"?', 'Tre?'), ('(Yes.) no', '(Sì.) no')]
    assert pairs.sentence_pairs('One. Two.', 'Uno, due.') == []


@pytest.mark.parametrize('pair, expected', [
    (('a library', 'una libreria'), True), (('same', 'same'), False), (('a library', '<trans>'), False),
    (('2.0', 'due'), False), (('x', 'y'), False), (('a file', 'a' * 40), False), (('', 'vuoto'), False)])
def test_what_is_a_translation(pair, expected):
    assert pairs.is_translation(pair) is expected


def fives(text):
    words = text.split()
    return [' '.join(words[i:i + 5]) for i in range(len(words) - 4)]


def test_split_by_source_package_with_little_overlap():
    text = [(f'source{k // 6}', pair) for k, pair in enumerate(sentence_pairs(600))]
    # Some sentences come again in other packages, as in related packages.
    text += [(f'source{k % 97}', pair) for k, (_, pair) in enumerate(text[::4])]
    split = pairs.split_text(text)
    kinds = {source: 'test' if (part := zlib.crc32(source.encode()) % 100) < 3 else 'valid' if part < 4 else 'train'
             for source, _ in text}
    sides = {kind: {pair for source, pair in text if kinds[source] == kind} for kind in ('train', 'valid', 'test')}
    assert set(split.train) == sides['train'] and len(split.train) == len(sides['train'])
    assert set(split.valid) == sides['valid'] - sides['train'] - sides['test'] and split.valid
    seen = {five for english, _ in split.train for five in fives(english)}
    long = {english: target for english, target in sides['test'] if len(english.split()) >= 7}
    few = {(english, target) for english, target in long.items()
           if sum(five in seen for five in fives(english)) <= len(fives(english)) / 2}
    assert set(split.test) == few and 0 < len(few) < len(long) == split.test_candidates
