"""Parallel text of Debian's package descriptions and their translations: extraction, alignment and splitting.

A description in English and its translation have the same `Description-md5`. Paragraphs are paired if both sides have
the same number of them, then list entries, then sentences.
"""
from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from .lines import language_token

Pair = tuple[str, str]

N = 5  # n-gram size of the comparison
MIN_WORDS = N + 2  # a test sentence has at least three n-grams
# Percentages of sources; the others are for training.
TEST, VALID = 3, 1

# In running text, a line may begin with the Italian word 'o'.
_BULLET = re.compile(r'(\s+[-*+o•·–]|[-*+•])\s+')
# A sentence may start with a capital letter, a number, or one of these after a quotation mark or bracket.
_SENTENCE_END = re.compile(r'(?<=[.!?])\s+(?=["\'«„(]?[^\W_a-zß-ÿ])')


def source_packages(lines: Iterable[str]) -> dict[str, str]:
    """The first source package of each `Description-md5` in an apt list of packages."""
    sources: dict[str, str] = {}
    for entry in _entries(lines, ('Package', 'Source', 'Description-md5')):
        if 'Description-md5' in entry:
            # 'gcc-12 (12.2.0-14)' where the version differs.
            source = entry.get('Source', entry.get('Package', ['']))[0].partition(' ')[0]
            sources.setdefault(entry['Description-md5'][0], source)
    return sources


def descriptions(lines: Iterable[str], language: str) -> dict[str, list[str]]:
    """The lines of each description in an apt list of translations, by `Description-md5`; the first is the title."""
    key = f'Description-{language}'
    return {entry['Description-md5'][0]: entry[key] for entry in _entries(lines, ('Description-md5', key))
            if len(entry) == 2}


def _entries(lines: Iterable[str], keys: tuple[str, ...]) -> Iterator[dict[str, list[str]]]:
    """Entries are separated by empty lines; a field is 'Key: text' and following lines that begin with a space."""
    entry: dict[str, list[str]] = {}
    field = None
    for line in chain(lines, ['']):
        line = line.rstrip('\n')
        if line.startswith((' ', '\t')):
            if field is not None:
                field.append(line[1:])
        elif line:
            key, _, value = line.partition(':')
            field = entry.setdefault(key, [value.strip()]) if key in keys else None
        elif entry:
            yield entry
            entry, field = {}, None


def parallel_text(english: dict[str, list[str]], translations: dict[str, list[str]],
                  sources: dict[str, str]) -> Iterator[tuple[str, Pair]]:
    """The source package and the sentences of each description with a translation, duplicates among them."""
    for md5, lines in translations.items():
        if md5 in english and md5 in sources:
            for pair in description_pairs(english[md5], lines):
                if is_translation(pair):
                    yield sources[md5], pair


def description_pairs(english: list[str], translation: list[str]) -> Iterator[Pair]:
    """Pairs the sentences of a description with those of its translation, both from :func:`descriptions`."""
    yield _normalize(english[0]), _normalize(translation[0])
    for paragraphs in _zip_equal(_paragraphs(english[1:]), _paragraphs(translation[1:])):
        for blocks in _zip_equal(*paragraphs):
            yield from _zip_equal(*(_SENTENCE_END.split(_normalize(block)) for block in blocks))


def _normalize(text: str) -> str:
    return ' '.join(text.split())


def _zip_equal(a: list, b: list) -> list[tuple]:
    """Pairs of items; empty if the lengths differ."""
    return list(zip(a, b, strict=True)) if len(a) == len(b) else []


def _paragraphs(lines: Iterable[str]) -> list[list[str]]:
    """Paragraphs end at lines of one dot. Each is a list of blocks: running text, or an entry of a list."""
    paragraphs: list[list[list[str]]] = [[]]
    for line in lines:
        if line.strip() == '.':
            paragraphs.append([])
            continue
        blocks = paragraphs[-1]
        bullet = _BULLET.match(line)
        if bullet or not blocks:
            blocks.append([])
        blocks[-1].append(line[bullet.end():] if bullet else line)
    return [[' '.join(block) for block in blocks] for blocks in paragraphs if blocks]


def is_translation(pair: Pair) -> bool:
    """Whether the sides of a pair have letters, differ, and their length ratio is at most three."""
    # Untranslated places are marked.
    if pair[0] == pair[1] or '<trans>' in pair[1] or not all(re.search(r'[^\W\d_]{2}', side) for side in pair):
        return False
    lengths = sorted(map(len, pair))
    return lengths[1] <= 3 * lengths[0] + 10


class SplitText(NamedTuple):
    """Pairs for training, validation and test, and the number of candidate sentences of the test set."""
    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]
    test_candidates: int


def split_text(text: Iterable[tuple[str, Pair]]) -> SplitText:
    """Splits pairs by their source, and removes duplicates.

    The split depends only on the name of a source, such as a package. Pairs that also occur in another split are not in
    the validation set. The test set has distinct sentences of at least 7 words, of whose 5-grams at most half occur in
    training.

    Args:
        text: sources and pairs. The words of the first side of a pair are compared, without its language token, over
            all languages.
    """
    train, valid, test = {}, {}, {}
    for source, pair in text:
        part = zlib.crc32(source.encode()) % 100
        (test if part < TEST else valid if part < TEST + VALID else train)[pair] = None
    # Hashes need a tenth of the memory of words.
    known = {hash(group) for first, _ in train for group in _groups(first)}
    candidates = {first: second for first, second in test if len(_words(first)) >= MIN_WORDS}
    chosen = []
    for pair in candidates.items():
        groups = [hash(group) in known for group in _groups(pair[0])]
        if 2 * sum(groups) <= len(groups):
            chosen.append(pair)
    valid = [pair for pair in valid if pair not in train and pair not in test]
    return SplitText(list(train), valid, chosen, len(candidates))


def _words(text: str) -> list[str]:
    return re.findall(r'\w+', text.removeprefix(language_token(text)).lower())


def _groups(text: str) -> Iterator[tuple[str, ...]]:
    words = _words(text)
    return zip(*(words[i:] for i in range(N)), strict=False)
