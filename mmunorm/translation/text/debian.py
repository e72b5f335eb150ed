"""Parallel text of Debian's package descriptions and their translations.

A description in English and its translation have the same `Description-md5`. Paragraphs are paired where both sides
have equally many, then the entries of lists, then sentences.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain

from .pairs import Pair, is_translation, sentence_pairs

# In running text, a line may begin with the Italian word 'o'.
_BULLET = re.compile(r'(\s+[-*+o•·–]|[-*+•])\s+')


def source_packages(lines: Iterable[str]) -> dict[str, str]:
    """The source package of each `Description-md5` in an apt list of packages.

    Of several source packages, the first counts.
    """
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


def description_pairs(english: list[str], translation: list[str]) -> Iterator[Pair]:
    """Pairs the sentences of a description with those of its translation, both as :func:`descriptions` has them."""
    yield ' '.join(english[0].split()), ' '.join(translation[0].split())
    sides = [_paragraphs(lines[1:]) for lines in (english, translation)]
    if len(sides[0]) != len(sides[1]):
        return
    for paragraphs in zip(*sides, strict=True):
        if len(paragraphs[0]) != len(paragraphs[1]):
            continue
        for blocks in zip(*paragraphs, strict=True):
            yield from sentence_pairs(*blocks)


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


def parallel_text(english: dict[str, list[str]], translations: dict[str, list[str]],
                  sources: dict[str, str]) -> Iterator[tuple[str, Pair]]:
    """The source package and the sentences of each description with a translation, duplicates among them."""
    for md5, lines in translations.items():
        if md5 in english and md5 in sources:
            for pair in description_pairs(english[md5], lines):
                if is_translation(pair):
                    yield sources[md5], pair
