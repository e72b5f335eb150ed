import zlib

import pytest

from projects.translation.translation.text import debian

from .makers import apt_lists, sentence_pairs


def test_pairs_of_package_lists():
    pairs = sentence_pairs(60)
    lists = {name: content.splitlines(keepends=True) for name, content in apt_lists(pairs).items()}
    text = list(debian.parallel_text(debian.descriptions(lists['x_Translation-en'], 'en'),
                                     debian.descriptions(lists['x_Translation-it'], 'it'),
                                     debian.source_packages(lists['x_Packages'])))
    assert [source for source, _ in text] == [f'source{k // 6}' for k in range(60)]
    written = [pair if k % 3 == 0 else tuple(f'{side.capitalize()}.' for side in pair) for k, pair in enumerate(pairs)]
    assert [pair for _, pair in text] == written


def test_packages_without_a_source_are_their_own_and_the_first_one_counts():
    lines = ['Package: a', 'Description-md5: 1', '', 'Package: b', 'Source: c (2)', 'Description-md5: 2', '',
             'Package: d', 'Description-md5: 1', '', 'Package: without']
    assert debian.source_packages(lines) == {'1': 'a', '2': 'c'}


ENGLISH = ['a title', 'The first v1.2  of e.g. this is', 'long. And the second! 3 is "it"? (Yes.) no', '.',
           'A list:', ' * one', '   goes on', ' * two', '.',
           'Only one. Version 1.2 of e.g. this.']
ITALIAN = ['un titolo', 'La prima frase. E la', 'seconda! Tre? (Sì.) no', '.',
           'Una lista:', ' - uno o', '   continua', ' - due', '.',
           'Una sola.  Versione 1.2', 'o altro.']


def test_paragraphs_lists_and_sentences_are_paired():
    assert list(debian.description_pairs(ENGLISH, ITALIAN)) == [
        ('a title', 'un titolo'), ('The first v1.2 of e.g. this is long.', 'La prima frase.'),
        ('And the second!', 'E la seconda!'), ('3 is "it"?', 'Tre?'), ('(Yes.) no', '(Sì.) no'),
        ('A list:', 'Una lista:'), ('one goes on', 'uno o continua'), ('two', 'due'), ('Only one.', 'Una sola.'),
        ('Version 1.2 of e.g. this.', 'Versione 1.2 o altro.')]


def test_descriptions_of_other_structure_are_dropped():
    title = [('a title', 'un titolo')]
    assert list(debian.description_pairs(ENGLISH, ITALIAN[:-3])) == title  # a paragraph less
    assert ('two', 'due') not in list(debian.description_pairs(ENGLISH, [*ITALIAN[:7], *ITALIAN[8:]]))  # an entry less
    assert list(debian.description_pairs(['a title', 'One. Two.'], ['un titolo', 'Uno, due.'])) == title
    assert list(debian.description_pairs(['a title'], ['un titolo'])) == title


@pytest.mark.parametrize('pair, expected', [
    (('a library', 'una libreria'), True), (('same', 'same'), False), (('a library', '<trans>'), False),
    (('2.0', 'due'), False), (('x', 'y'), False), (('a file', 'a' * 40), False), (('', 'vuoto'), False)])
def test_what_is_a_translation(pair, expected):
    assert debian.is_translation(pair) is expected


def fives(text):
    words = text.split()
    return [' '.join(words[i:i + 5]) for i in range(len(words) - 4)]


def test_split_by_source_package_with_little_overlap():
    text = [(f'source{k // 6}', pair) for k, pair in enumerate(sentence_pairs(600))]
    # Some sentences come again in other packages, as in related packages.
    text += [(f'source{k % 97}', pair) for k, (_, pair) in enumerate(text[::4])]
    split = debian.split_text(text)
    kinds = {source: 'test' if (part := zlib.crc32(source.encode()) % 100) < 3 else 'valid' if part < 4 else 'train'
             for source, _ in text}
    sides = {kind: {pair for source, pair in text if kinds[source] == kind} for kind in ('train', 'valid', 'test')}
    assert set(split.train) == sides['train'] and len(split.train) == len(sides['train'])
    assert set(split.valid) == sides['valid'] - sides['train'] - sides['test'] and split.valid
    known = {five for english, _ in split.train for five in fives(english)}
    long = {english: target for english, target in sides['test'] if len(english.split()) >= 7}
    few = {(english, target) for english, target in long.items()
           if sum(five in known for five in fives(english)) <= len(fives(english)) / 2}
    assert set(split.test) == few and 0 < len(few) < len(long) == split.test_candidates


def test_training_in_one_language_counts_for_the_test_of_another():
    """A language token is not a word."""
    names = [f'source{k}' for k in range(99)]
    test, train = (next(name for name in names if (zlib.crc32(name.encode()) % 100 < debian.TEST) is is_test)
                   for is_test in (True, False))
    known, new, short = (
        'each of these words has been seen', 'a sentence of seven words is new', 'six words are not long enough')
    split = debian.split_text([(train, (f'<2de> {known}', 'x')), *((test, (f'<2{language}> {sentence}', sentence))
                               for language in ('de', 'it') for sentence in (known, new, short))])
    assert split.train == [(f'<2de> {known}', 'x')] and split.test_candidates == 4
    assert split.test == [(f'<2de> {new}', new), (f'<2it> {new}', new)]
