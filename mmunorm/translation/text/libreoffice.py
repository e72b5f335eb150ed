"""Parallel text of LibreOffice's help: pages in many languages, whose paragraphs have the same ids."""
from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from .pairs import Pair, is_translation, sentence_pairs

FOLDER = 'usr/share/libreoffice/help'


def help_text(root: Path, language: str) -> Iterator[tuple[str, Pair]]:
    """The page and the sentences of each paragraph with a translation, duplicates among them.

    Args:
        root: the folder where both packages are unpacked.
        language: as in the package's name, such as 'de'.
    """
    english = root / FOLDER / 'en-US'
    for page in sorted(english.rglob('*.html')):
        name = page.relative_to(english)
        other = root / FOLDER / language / name
        if other.exists():
            sides = paragraphs(page.read_text(encoding='utf-8')), paragraphs(other.read_text(encoding='utf-8'))
            for key in sides[0]:
                for pair in sentence_pairs(sides[0][key], sides[1].get(key, "")):
                    if is_translation(pair):
                        yield f'help/{name.as_posix()}', pair


def paragraphs(page: str) -> dict[str, str]:
    """The text of each paragraph and heading of a help page, by id, but for what depends on the system or program."""
    parser = _Paragraphs()
    parser.feed(page)
    return {key: ''.join(parts) for key, parts in parser.found.items()}


class _Paragraphs(HTMLParser):

    def __init__(self):
        super().__init__()
        self.found: dict[str, list[str]] = {}
        self._tag = self._id = None

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        key = attrs.get('id') or ''
        if key.startswith(('par_', 'hd_')):
            self._tag, self._id = tag, key
            self.found[key] = []
        elif self._id and key.startswith('swln'):  # one text for each system
            del self.found[self._id]
            self._id = None

    def handle_data(self, data):
        if self._id:
            self.found[self._id].append(data)

    def handle_endtag(self, tag):
        if tag == self._tag:
            self._id = None
