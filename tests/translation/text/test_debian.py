from mmunorm.translation.text import debian

from .makers import apt_lists, sentence_pairs

PAIRS = sentence_pairs(60)


def test_lists_give_all_pairs_with_their_source_packages():
    lists = {name: content.splitlines(keepends=True) for name, content in apt_lists(PAIRS).items()}
    text = list(debian.parallel_text(debian.descriptions(lists['x_Translation-en'], 'en'),
                                     debian.descriptions(lists['x_Translation-it'], 'it'),
                                     debian.source_packages(lists['x_Packages'])))
    assert [source for source, _ in text] == [f'source{k // 6}' for k in range(60)]
    written = [pair if k % 3 == 0 else tuple(f'{side.capitalize()}.' for side in pair) for k, pair in enumerate(PAIRS)]
    assert [pair for _, pair in text] == written


def test_packages_without_a_source_are_their_own_and_the_first_one_counts():
    lines = ['Package: a', 'Description-md5: 1', '', 'Package: b', 'Source: c (2)', 'Description-md5: 2', '',
             'Package: d', 'Description-md5: 1', '', 'Package: without']
    assert debian.source_packages(lines) == {'1': 'a', '2': 'c'}


ENGLISH = ['a title', 'The first sentence is', 'long. And the second!', '.',
           'A list:', ' * one', '   goes on', ' * two', '.',
           'Only one. Version 1.2 of e.g. this.']
ITALIAN = ['un titolo', 'La prima frase. E la', 'seconda!', '.',
           'Una lista:', ' - uno o', '   continua', ' - due', '.',
           'Una sola.  Versione 1.2', 'o altro.']


def test_paragraphs_lists_and_sentences_are_paired():
    assert list(debian.description_pairs(ENGLISH, ITALIAN)) == [
        ('a title', 'un titolo'), ('The first sentence is long.', 'La prima frase.'),
        ('And the second!', 'E la seconda!'), ('A list:', 'Una lista:'), ('one goes on', 'uno o continua'),
        ('two', 'due'), ('Only one.', 'Una sola.'), ('Version 1.2 of e.g. this.', 'Versione 1.2 o altro.')]


def test_what_does_not_fit_is_left_out():
    title = [('a title', 'un titolo')]
    assert list(debian.description_pairs(ENGLISH, ITALIAN[:-3])) == title  # a paragraph less
    assert ('two', 'due') not in list(debian.description_pairs(ENGLISH, [*ITALIAN[:7], *ITALIAN[8:]]))  # an entry less
    assert list(debian.description_pairs(['a title', 'One. Two.'], ['un titolo', 'Uno, due.'])) == title
    assert list(debian.description_pairs(['a title'], ['un titolo'])) == title
